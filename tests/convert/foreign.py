"""Small checkpoints as other tools write them, each made of the tensors of a random one in the official layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from npu_gptoss.model.config import GptOssConfig
from tests.checkpoints import random_config, random_tensors

Tensors = dict[str, torch.Tensor]
EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
FP8 = torch.float8_e4m3fn


def original(tensors: Tensors) -> Tensors:
    """OpenAI's original/: qkv fused, experts [experts, out, in], its own names."""
    out: Tensors = {}
    fixed = {
        "model.embed_tokens.weight": "embedding.weight",
        "lm_head.weight": "unembedding.weight",
        "model.norm.weight": "norm.scale",
    }
    layer = {
        "input_layernorm.weight": "attn.norm.scale",
        "self_attn.sinks": "attn.sinks",
        "self_attn.o_proj.weight": "attn.out.weight",
        "self_attn.o_proj.bias": "attn.out.bias",
        "post_attention_layernorm.weight": "mlp.norm.scale",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.router.bias": "mlp.gate.bias",
        "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
        "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
        "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
        "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
        "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
        "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
        "mlp.experts.gate_up_proj": "mlp.mlp1_weight",
        "mlp.experts.down_proj": "mlp.mlp2_weight",
    }
    for name, tensor in tensors.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if not found:
            out[fixed[name]] = tensor
        elif found[2] in layer:
            turned = found[2].endswith(("gate_up_proj", "down_proj"))
            out[f"block.{found[1]}.{layer[found[2]]}"] = tensor.transpose(1, 2) if turned else tensor
        elif found[2].startswith("self_attn.q_proj"):
            parts = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            out[f"block.{found[1]}.attn.qkv.{name.rpartition('.')[2]}"] = torch.cat(parts)
    return out


def unsloth(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if found := EXPERTS.fullmatch(name):
            for n, one in enumerate(tensor):
                kind = "bias" if found[3] else "weight"
                out[f"{found[1]}.{found[2]}_projs.{n}.{kind}"] = one if found[3] else one.t()
        else:
            out[name.replace(".router.", ".router.linear.")] = tensor
    return out


def linearised(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        found = EXPERTS.fullmatch(name)
        if not found:
            out[name] = tensor
            continue
        kind = "bias" if found[3] else "weight"
        for n, one in enumerate(tensor):
            rows = one if found[3] else one.t()  # [out, in]
            parts = {"gate": rows[0::2], "up": rows[1::2]} if found[2] == "gate_up" else {"down": rows}
            out |= {f"{found[1]}.experts.{n}.{part}_proj.{kind}": value for part, value in parts.items()}
    return out


def mlx(tensors: Tensors) -> Tensors:
    """`mlx_lm.fuse --dequantize`: all experts in one tensor [experts, out, in], gate and up apart."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if found := EXPERTS.fullmatch(name):
            rows, kind = (tensor, "bias") if found[3] else (tensor.mT, "weight")
            parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if found[2] == "gate_up" else {"down": rows}
            out |= {f"{found[1]}.{part}_proj.{kind}": value.contiguous() for part, value in parts.items()}
        else:
            out[name] = tensor
    return out


def prefixed(prefix: str, inside: str = "") -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        prefix + re.sub(r"(layers\.\d+\.)", rf"\1{inside}", name): tensor for name, tensor in tensors.items()
    }


def block_fp8(tensors: Tensors) -> Tensors:
    """DeepSeek's: float8 with a float32 scale for each block of 128 x 128, of attention and of the experts."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if re.search(r"_proj\.weight$|experts\.(gate_up|down)_proj$", name):
            scales = [-(-size // 128) for size in tensor.shape[-2:]]
            scale = torch.rand(*tensor.shape[:-2], *scales, generator=torch.Generator().manual_seed(1)) + 0.5
            out[name] = (tensor.float() / spread(scale, tensor.shape)).to(FP8)
            out[f"{name}_scale_inv"] = scale
        else:
            out[name] = tensor
    return out


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    for axis in (-2, -1):
        scale = scale.repeat_interleave(128, dim=axis).narrow(axis, 0, shape[axis])
    return scale


def row_fp8(tensors: Tensors) -> Tensors:
    """llm-compressor's float-quantized: linearised experts, a scale a row, in bfloat16, and scales of activations."""
    out: Tensors = {}
    for name, tensor in linearised(tensors).items():
        if name.endswith("_proj.weight"):
            scale = (tensor.float().abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-6).to(torch.bfloat16)
            out[name] = (tensor.float() / scale.float()).to(FP8)
            out[f"{name}_scale"] = scale
            out[name.replace("weight", "input_scale")] = torch.ones(1)
        else:
            out[name] = tensor
    return out


def write(
    directory: Path, tensors: Tensors, config: GptOssConfig, *, file: str = "model.safetensors", **fields: object
) -> Path:
    """One file and config.json; fields: of config.json, None to leave one out."""
    directory.mkdir(parents=True, exist_ok=True)
    # memory of its own for each: the format refuses tensors that share theirs
    save_file({n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}, directory / file)
    values = {name: value for name, value in {**config.to_dict(), **fields}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def small(*, mxfp4: bool = False, seed: int = 0, **sizes: object) -> tuple[GptOssConfig, Tensors]:
    """Two layers, an intermediate size that is not the hidden size."""
    config = random_config(mxfp4=mxfp4, **{"layers": 2, "experts": 4} | sizes)
    return config, random_tensors(config, seed)
