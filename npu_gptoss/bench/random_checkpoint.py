"""Random gpt-oss weights of full size in the official layout, made on the device, for measurements.

Speed depends on shapes, on how many experts the tokens of a step are spread over, and on values that differ; it does
not depend on training. Normal weights of the published initializer's size give router logits of unit scale, so a step's
tokens spread over the experts almost evenly, an upper estimate of real traffic. The checkpoint has no tokenizer: it is
for token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from npu_gptoss.engine.device import resolve_device
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.moe.mxfp4 import GROUP
from npu_gptoss.tiny.checkpoint import tiny_config
from npu_gptoss.verify.moe_cases import STD, random_mxfp4

SHAPES = {"20b": (24, 32), "120b": (36, 128)}  # layers, experts
LAYOUTS = ("mxfp4", "bf16")


def full_config(size: str, *, mxfp4: bool = True) -> GptOssConfig:
    """The published numbers of 20b or 120b."""
    if size not in SHAPES:
        raise InputError(f"the published sizes are {', '.join(SHAPES)}, got {size!r}")
    layers, experts = SHAPES[size]
    shape = {"layers": layers, "hidden": 2880, "intermediate": 2880, "experts": experts, "heads": 64, "kv_heads": 8}
    return tiny_config(**shape, mxfp4=mxfp4)  # which has all other numbers as published


def model_name(config: GptOssConfig) -> str:
    """20b or 120b, or the numbers of another shape."""
    for size in SHAPES:
        other = full_config(size, mxfp4=config.quantization is not None)
        if replace(other, dtype=config.dtype, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id) == (
            replace(config, other_eos_token_ids=())
        ):
            return size
    return f"{config.num_hidden_layers}x{config.hidden_size}x{config.num_local_experts}e"


def random_tensors(config: GptOssConfig, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the config's layout, one by one, in the order of the official names."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, spec in expected_tensors(config).items():
        stem = name.removesuffix("_blocks")
        std = 1.0 if name.endswith(("embed_tokens.weight", "sinks")) else STD
        if name.endswith("norm.weight"):
            yield name, torch.ones(spec.shape, device=device, dtype=torch.bfloat16)
        elif stem != name:
            experts, rows, groups, _ = spec.shape
            blocks, scales = random_mxfp4((experts, rows, groups * GROUP), std, generator)
            yield name, blocks
            yield f"{stem}_scales", scales
        elif not name.endswith("_scales"):
            drawn = torch.empty(spec.shape, device=device, dtype=torch.bfloat16)
            yield name, drawn.normal_(0.0, std, generator=generator)


# -- `bench checkpoint`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must hold no weights")
    parser.add_argument("--size", choices=SHAPES, default="20b")
    parser.add_argument("--weights", choices=LAYOUTS, default="mxfp4", help="layout of the experts (default: mxfp4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where the numbers are drawn")


def run(args: argparse.Namespace) -> int:
    config = full_config(args.size, mxfp4=args.weights == "mxfp4")
    tensors = random_tensors(config, args.seed, resolve_device(args.device))
    write_checkpoint(args.directory, config, tensors)  # whole or not at all; never over weights
    size = sum(path.stat().st_size for path in args.directory.iterdir()) / 1e9
    print(f"{args.directory}: {args.size} {args.weights}, random, {size:.1f} GB")
    return 0
