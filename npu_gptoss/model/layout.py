"""The tensors of a gpt-oss checkpoint, and checks of given tensors against them.

Contract: the tensors of openai/gpt-oss-20b and -120b in their two layouts. In the MXFP4 layout each expert matrix is a
pair `…_blocks` `[experts, rows, groups, 16]` and `…_scales` `[experts, rows, groups]`, rows being the output axis. In
the BF16 layout (transformers: dequantized) it is one tensor `[experts, in, out]`: the expansion with its last
two axes swapped. All other tensors are the same in both, each in bfloat16 or
float32: tools that fine-tune leave some (norms, an lm_head) in float32 beside bfloat16 ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from npu_gptoss.errors import short
from npu_gptoss.files import wrong
from npu_gptoss.kernels.signature import dtype_name
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.foreign import convert_command
from npu_gptoss.model.safetensors_reader import listed
from npu_gptoss.moe.mxfp4 import GROUP

FLOATS = (torch.bfloat16, torch.float32)
BYTES = (torch.uint8,)
PACKED = re.compile(r"(?P<name>.*\.mlp\.experts\.(?:gate_up|down)_proj)_(?P<half>blocks|scales)")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.*)")
_PLAIN = re.compile(r".*\.mlp\.experts\.(?:gate_up|down)_proj")


@dataclass(frozen=True)
class TensorSpec:
    """The required shape and dtype of one tensor; `dtypes` are alternatives."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS


def layer_tensors(config: GptOssConfig, packed: bool) -> dict[str, TensorSpec]:
    """A layer's tensors in the order of their use, without their prefix `model.layers.N.`; packed: the MXFP4 layout."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    specs = {"input_layernorm.weight": TensorSpec((hidden,))}
    for name, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
        specs[f"self_attn.{name}_proj.weight"] = TensorSpec((rows, columns))
        specs[f"self_attn.{name}_proj.bias"] = TensorSpec((rows,))
    specs["self_attn.sinks"] = TensorSpec((config.num_attention_heads,))
    specs["post_attention_layernorm.weight"] = TensorSpec((hidden,))
    specs["mlp.router.weight"] = TensorSpec((experts, hidden))
    specs["mlp.router.bias"] = TensorSpec((experts,))
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        stem = f"mlp.experts.{name}"
        if packed:
            groups = columns // GROUP
            specs[stem + "_blocks"] = TensorSpec((experts, rows, groups, GROUP // 2), BYTES)
            specs[stem + "_scales"] = TensorSpec((experts, rows, groups), BYTES)
        else:
            specs[stem] = TensorSpec((experts, columns, rows))
        specs[stem + "_bias"] = TensorSpec((experts, rows))
    return specs


def expected_tensors(config: GptOssConfig) -> dict[str, TensorSpec]:
    """The official name of every tensor, in the order in which the model uses them; MXFP4 layout if the config says so.

    Each floating-point one is bfloat16 or float32.
    """
    rows = TensorSpec((config.vocab_size, config.hidden_size))
    layer = layer_tensors(config, bool(config.quantization))
    return {
        "model.embed_tokens.weight": rows,
        **{f"model.layers.{i}.{suffix}": s for i in range(config.num_hidden_layers) for suffix, s in layer.items()},
        "model.norm.weight": TensorSpec((config.hidden_size,)),
        "lm_head.weight": rows,
    }


def split_layer(name: str) -> tuple[int | None, str]:
    """`model.layers.3.mlp.router.bias` -> (3, `mlp.router.bias`); a name outside the layers -> (None, name)."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def accounted(
    tensors: Iterable[tuple[str, torch.Tensor]], config: GptOssConfig, where: object, *, expanded: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes a whole checkpoint's tensors on, checked by an `Account`."""
    account = Account(config, where, expanded=expanded)
    for name, tensor in tensors:
        account.take(name, tensor)
        yield name, tensor
        del tensor  # or it would stay in memory while the next one is read
    account.close()


class Account:
    """The tensors of a checkpoint that have come: each known, once, in its shape and dtype; in the end all of them.

    expanded: MXFP4 experts may come in the BF16 layout. Raises CheckpointError, which names the tensor.
    """

    def __init__(self, config: GptOssConfig, where: object, *, expanded: bool = False) -> None:
        self.config, self.where, self.expanded = config, where, expanded
        self.expected, self.seen = expected_tensors(config), set()

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Checks one tensor and remembers it."""
        if self.expanded and name not in self.expected and _PLAIN.fullmatch(name):
            self.expected = expected_tensors(replace(self.config, quantization=None))
        if name in self.seen:
            raise wrong(self.where, f"{name} should come once, got it twice: the shards overlap.", name)
        self.seen.add(name)
        if name not in self.expected:
            check_layout([name], self.config, self.where)
            check_names([*self.expected, name], self.expected, self.where)
        check_tensor(name, tuple(tensor.shape), tensor.dtype, self.expected[name], self.where)

    @property
    def complete(self) -> bool:
        return self.seen == self.expected.keys()

    def close(self) -> None:
        """Raises unless all have come."""
        check_names(self.seen, self.expected, self.where)


def check_layout(names: Iterable[str], config: GptOssConfig, where: object) -> None:
    """Says in one sentence that config.json and the experts' tensors disagree, instead of listing every tensor."""
    names = list(names)
    packed = next((name for name in names if PACKED.fullmatch(name)), None)
    plain = next((name for name in names if _PLAIN.fullmatch(name)), None)
    if packed and plain:
        said = f"expected experts in one layout, got {packed} (MXFP4) and {plain} (BF16)."
        raise wrong(where, f"{said} The files are of two checkpoints: download one of them again.", packed)
    if config.quantization and plain:
        said = f"config.json says that the experts are MXFP4, got {plain}, the BF16 layout."
        raise wrong(where, f"{said} Remove quantization_config from it.", "quantization_config")
    if packed and not config.quantization:
        said = f"config.json has no quantization_config, so the experts should be in the BF16 layout, got {packed}"
        remedy = 'Write "quantization_config": {"quant_method": "mxfp4"} into it.'
        raise wrong(where, f"{said} (MXFP4). {remedy}", "quantization_config")


def check_names(found: Collection[str], expected: Collection[str], where: object) -> None:
    """All the names, and no other."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    kinds = {"missing": missing, "unexpected": unexpected}
    faults = [f"{len(names)} {kind} ({listed(names)})" for kind, names in kinds.items() if names]
    if faults:
        said = f"expected the {len(expected)} tensors of gpt-oss by config.json, got {' and '.join(faults)}."
        said += " Check that config.json belongs to these weights and that the download is complete."
        raise wrong(where, said, (missing + unexpected)[0])


def check_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype | str, spec: TensorSpec, where: object) -> None:
    """Shape and dtype; `dtype` is the file's word for it where torch has none."""
    if shape != spec.shape:
        said = f"{name} should have shape {list(spec.shape)} by config.json, got {list(shape)}."
        remedy = "Check that config.json belongs to these weights."
        if name.endswith(".mlp.router.weight") and shape[1:] == spec.shape[1:]:
            remedy = f"If the experts were pruned, write {shape[0]} as num_local_experts into config.json."
        raise wrong(where, f"{said} {remedy}", name)
    if dtype not in spec.dtypes:
        remedy = "Take the official MXFP4 checkpoint or a BF16 one."
        if dtype == torch.float16:
            remedy = "float16 has cut off what exceeds its range. " + remedy
        if dtype in (torch.float16, torch.float64) and isinstance(where, Path):
            remedy += f" `{convert_command(where.parent)}` turns these values into BF16."
        allowed = " or ".join(map(dtype_name, spec.dtypes))
        raise wrong(where, f"{name} should have dtype {allowed}, got {short(dtype_name(dtype))}. {remedy}", name)


def common_float(dtypes: Mapping[str, torch.dtype | str | None], where: object) -> torch.dtype:
    """The one dtype of floating-point tensors that are written; raises where there are two."""
    floats = {name: dtype for name, dtype in dtypes.items() if dtype in FLOATS}
    (first, common), *others = floats.items()
    for name, dtype in others:
        if dtype != common:
            said = f"all tensors but MXFP4's should have one dtype, got {first} in {dtype_name(common)} and {name} in"
            raise wrong(where, f"{said} {dtype_name(dtype)}. Convert them to one of the two.", name)
    return common
