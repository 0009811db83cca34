"""Random gpt-oss weights of full size in the official layout, made on the device: something to measure with.

Speed depends on shapes, on how many experts the tokens of a step are spread over and on values not being all alike;
it does not depend on what a model has learned. Normal weights of the published initializer's size give router logits
of unit scale, so that a step's tokens spread over the experts almost evenly, as an upper estimate of real traffic.
The checkpoint has no tokenizer: it is for token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe.mxfp4 import E2M1, GROUP
from npu_gptoss.tiny.checkpoint import tiny_config

SHAPES = {"20b": (24, 32), "120b": (36, 128)}  # layers, experts
LAYOUTS = ("mxfp4", "bf16")
STD = 0.02  # `initializer_range` of the published config
# E8M0 bytes of 2 ** -7 and 2 ** -6: normal weights of STD reach 2.3 and 4.7 deviations under them, as trained ones do.
# Those of another deviation have others, so that their codes are spread alike.
SCALES = (120, 121)
EXPERTS_AT_ONCE = 8  # of one layer; bounds the memory that making them takes


def full_config(size: str, *, mxfp4: bool = True) -> GptOssConfig:
    """The published numbers of 20b or 120b."""
    if size not in SHAPES:
        raise InputError(f"the published sizes are {', '.join(SHAPES)}, got {size!r}")
    layers, experts = SHAPES[size]
    shape = {"layers": layers, "hidden": 2880, "intermediate": 2880, "experts": experts, "heads": 64, "kv_heads": 8}
    return tiny_config(**shape, mxfp4=mxfp4)  # which has all other numbers as published


def model_name(config: GptOssConfig) -> str:
    """20b or 120b, or what tells another shape apart."""
    for size in SHAPES:
        other = full_config(size, mxfp4=config.quantization is not None)
        if replace(other, dtype=config.dtype, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id) == (
            replace(config, other_eos_token_ids=())
        ):
            return size
    return f"{config.num_hidden_layers}x{config.hidden_size}x{config.num_local_experts}e"


def scales_of(std: float) -> tuple[int, ...]:
    """SCALES moved by whole powers of two to where they are to `std` what SCALES are to STD."""
    return tuple(scale + round(math.log2(std / STD)) for scale in SCALES)


def random_mxfp4(
    shape: tuple[int, ...], std: float, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values rounded to E2M1 under a drawn scale a group: blocks [..., groups, 16], scales [..., groups]."""
    *rows, columns = shape
    groups = columns // GROUP
    scales = torch.randint(0, len(SCALES), (*rows, groups), generator=generator, device=device)
    scales = torch.tensor(scales_of(std), device=device, dtype=torch.uint8)[scales]
    values = torch.randn((*rows, groups, GROUP), generator=generator, device=device)
    values *= std * torch.exp2(127.0 - scales[..., None].float())
    steps = torch.tensor(E2M1, device=device)
    codes = torch.bucketize(values.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def random_tensors(
    config: GptOssConfig, seed: int, device: torch.device, deviations: Mapping[str, float] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the config's layout, one by one, in the order of the official names.

    deviations: by the end of a name, where they are not the published initializer's.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def std_of(name: str, usual: float = STD) -> float:
        return next((std for end, std in (deviations or {}).items() if name.endswith(end)), usual)

    def normal(name: str, *shape: int, std: float = STD) -> tuple[str, torch.Tensor]:
        drawn = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return name, drawn.normal_(0.0, std_of(name, std), generator=generator)

    def ones(name: str) -> tuple[str, torch.Tensor]:
        return name, torch.ones(hidden, device=device, dtype=torch.bfloat16)

    def of_experts(name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        if config.quantization is None:
            yield normal(name, experts, columns, rows)
            return
        parts = [
            random_mxfp4((min(EXPERTS_AT_ONCE, experts - first), rows, columns), std_of(name), generator, device)
            for first in range(0, experts, EXPERTS_AT_ONCE)
        ]
        for end, halves in zip(("blocks", "scales"), zip(*parts, strict=True), strict=True):
            yield f"{name}_{end}", torch.cat(halves)

    yield normal("model.embed_tokens.weight", config.vocab_size, hidden, std=1.0)
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}."
        yield ones(base + "input_layernorm.weight")
        yield ones(base + "post_attention_layernorm.weight")
        for name, rows, columns in (("q", query, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, query)):
            yield normal(f"{base}self_attn.{name}_proj.weight", rows, columns)
            yield normal(f"{base}self_attn.{name}_proj.bias", rows)
        yield normal(base + "self_attn.sinks", config.num_attention_heads, std=1.0)
        yield normal(base + "mlp.router.weight", experts, hidden)
        yield normal(base + "mlp.router.bias", experts)
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield from of_experts(f"{base}mlp.experts.{name}", rows, columns)
            yield normal(f"{base}mlp.experts.{name}_bias", experts, rows)
    yield ones("model.norm.weight")
    yield normal("lm_head.weight", config.vocab_size, hidden)


def write_random_checkpoint(directory: Path, config: GptOssConfig, *, seed: int, device: torch.device) -> None:
    """Writes weights and config.json, whole or not at all; refuses a directory that holds weights already."""
    write_checkpoint(directory, config, random_tensors(config, seed, device))
