"""Where a tensor of another tool's checkpoint belongs in the official layout.

`place` reads names: OpenAI's original/ (gpt_oss/torch/weights.py), unsloth's modules for experts (unsloth_zoo,
`GptOssExpertsBnb4bit`), llm-compressor's (`GptOssLinearExperts`), mlx-lm's without quantization (`SwitchGLU`), those of
Tinker's adapters (w1, w2, w3: gate, down, up), and the prefixes of wrappers in any combination. A place is an official
tensor in the BF16 layout and a view of it: a piece is copied into it, a LoRA delta is added to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gptoss.model.config import GptOssConfig

View = Callable[[torch.Tensor], torch.Tensor]
_WRAPPERS = {
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "base_layer",
}
_ROOTS = {"layers", "embed_tokens", "norm"}

# of original/, whole tensors: name -> official name
_ORIGINAL = tuple(
    (re.compile(pattern), name)
    for pattern, name in {
        r"embedding\.weight": "model.embed_tokens.weight",
        r"unembedding\.weight": "lm_head.weight",
        r"(?:model\.)?norm\.scale": "model.norm.weight",
        r"block\.(\d+)\.attn\.norm\.scale": r"model.layers.\1.input_layernorm.weight",
        r"block\.(\d+)\.attn\.sinks": r"model.layers.\1.self_attn.sinks",
        r"block\.(\d+)\.attn\.out\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
        r"block\.(\d+)\.mlp\.norm\.scale": r"model.layers.\1.post_attention_layernorm.weight",
        r"block\.(\d+)\.mlp\.gate\.(weight|bias)": r"model.layers.\1.mlp.router.\2",
        r"block\.(\d+)\.mlp\.mlp1_weight\.(blocks|scales)": r"model.layers.\1.mlp.experts.gate_up_proj_\2",
        r"block\.(\d+)\.mlp\.mlp2_weight\.(blocks|scales)": r"model.layers.\1.mlp.experts.down_proj_\2",
        r"block\.(\d+)\.mlp\.mlp1_bias": r"model.layers.\1.mlp.experts.gate_up_proj_bias",
        r"block\.(\d+)\.mlp\.mlp2_bias": r"model.layers.\1.mlp.experts.down_proj_bias",
        r"(model\.layers\.\d+\.mlp\.router)\.linear\.(weight|bias)": r"\1.\2",  # unsloth's
        r"(model\.layers\.\d+)\.attn\.([qkvo]_proj\.weight)": r"\1.self_attn.\2",  # Tinker's, as the next
        r"unembed_tokens\.weight": "lm_head.weight",
    }.items()
)
_TURNED = re.compile(r"block\.(\d+)\.mlp\.mlp([12])_weight")  # [experts, out, in]
_FUSED = re.compile(r"block\.(\d+)\.attn\.qkv\.(weight|bias)")
_EXPERT = re.compile(
    r"(?P<stem>model\.layers\.\d+\.mlp\.experts)\."
    r"(?:(?P<whole>gate_up|down)_projs\.(?P<n>\d+)|"
    r"(?:(?:experts\.)?(?P<m>\d+)\.)?(?:(?P<part>gate|up|down)_proj|(?P<letter>w[123])))"
    r"\.(?P<kind>weight|bias)"
)


def WHOLE(tensor: torch.Tensor) -> torch.Tensor:
    """The view that is the tensor itself."""
    return tensor


def TRANSPOSED(tensor: torch.Tensor) -> torch.Tensor:
    """The view with the last two axes swapped."""
    return tensor.mT


@dataclass(frozen=True)
class Place:
    """`view` of the official tensor `name`. rows: of the foreign tensor, where it is a fusion of several."""

    name: str
    view: View = WHOLE
    rows: slice | None = None


def unwrapped(name: str) -> str:
    """The name without the parts that torch.compile, FSDP, DeepSpeed, peft and multimodal wrappers put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if "modules_to_save" in parts:  # peft's, followed by the adapter's name
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    while len(parts) > 1 and parts[0] in ("base_model", "model", "language_model"):
        parts.pop(0)
    return ".".join(["model", *parts] if parts[0] in _ROOTS else parts)


def place(name: str, config: GptOssConfig) -> list[Place]:
    """The places of a foreign tensor, several where it is a fusion. An unknown name comes back as it is."""
    name = unwrapped(name)
    for pattern, official in _ORIGINAL:
        if found := pattern.fullmatch(name):
            return [Place(found.expand(official))]
    if found := _TURNED.fullmatch(name):
        matrix = {"1": "gate_up_proj", "2": "down_proj"}[found[2]]
        return [Place(f"model.layers.{found[1]}.mlp.experts.{matrix}", TRANSPOSED)]
    if found := _FUSED.fullmatch(name):
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        places, first = [], 0
        for letter, rows in zip("qkv", (count * config.head_dim for count in heads), strict=True):
            official = f"model.layers.{found[1]}.self_attn.{letter}_proj.{found[2]}"
            places.append(Place(official, rows=slice(first, first + rows)))
            first += rows
        return places
    if found := _EXPERT.fullmatch(name):
        return [_of_expert(found)]
    return [Place(name)]


def _of_expert(found: re.Match[str]) -> Place:
    """One expert's linear layer, [out, in], of MLX all experts'; gate and up take turns among the official columns,
    gate first."""
    part = found["whole"] or found["part"] or {"w1": "gate", "w2": "down", "w3": "up"}[found["letter"]]
    number = found["n"] or found["m"]
    expert = slice(None) if number is None else int(number)
    matrix = "down_proj" if part == "down" else "gate_up_proj"
    columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}.get(part, slice(None))
    if found["kind"] == "bias":
        return Place(f"{found['stem']}.{matrix}_bias", lambda tensor: tensor[expert, columns])
    return Place(f"{found['stem']}.{matrix}", lambda tensor: tensor[expert].mT[..., columns, :])
