"""The numbers that define one gpt-oss model, read from a checkpoint's config.json completely or refused in words.

`config_fields.py` has the table of fields; here are the values and the relations between them. They are checked in
every `GptOssConfig`, however it is built. A field may be absent: its default is that of transformers' class, which is
the published 120b.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from npu_gptoss.errors import Refusal
from npu_gptoss.files import is_directory, is_there, read_json
from npu_gptoss.model.config_fields import (
    ARCHITECTURE,
    FULL,
    MODEL_TYPE,
    MXFP4,
    PUBLISHED_YARN,
    SLIDING,
    ConfigError,
    check_all,
    is_number,
    read_fields,
    refuse,
    warn_once,
)
from npu_gptoss.model.foreign import convert_command, refuse_foreign

CONFIG_NAME = "config.json"
TENSOR_PARALLEL = "--tensor-parallel-size"
_ADAPTER = "adapter_config.json"
_ORIGINAL = "original"  # OpenAI's folder with weights in a layout of its own
_INNER = ("snapshots/*", "*")  # checkpoints of a hub's cache, and of a training's output
MXFP4_GROUP = 32  # values that share one scale: the axis that is summed over must hold whole groups
_QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": MXFP4,
}
# Fields of the published files beside the numbers of `GptOssConfig`
_CONSTANTS = {
    "architectures": [ARCHITECTURE],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": MODEL_TYPE,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.9,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
}


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's numbers, as in `rope_scaling` of config.json.

    The defaults are transformers' for a file without these fields. The published files say `truncate` false, which is
    another function (see rope.py).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_all(self, "rope_scaling")
        if self.beta_fast <= self.beta_slow:
            refuse("rope_scaling.beta_fast", f"expected more than beta_slow ({self.beta_slow})", self.beta_fast)


def _relations(c: GptOssConfig) -> tuple[tuple[str, bool, str], ...]:
    """Returns (field, True when its relation to another field holds, the expectation) for each relation."""
    heads, vocabulary = c.num_key_value_heads, f"less than vocab_size ({c.vocab_size})"
    groups = f"a multiple of {MXFP4_GROUP} in an MXFP4 checkpoint, where so many values share a scale"
    layers = f"one type for each of num_hidden_layers ({c.num_hidden_layers})"
    experts = f"at most num_local_experts ({c.num_local_experts})"
    return (
        ("num_attention_heads", c.num_attention_heads % heads == 0, f"a multiple of num_key_value_heads ({heads})"),
        ("num_experts_per_tok", c.num_experts_per_tok <= c.num_local_experts, experts),
        ("layer_types", len(c.layer_types) == c.num_hidden_layers, layers),
        ("hidden_size", c.quantization is None or c.hidden_size % MXFP4_GROUP == 0, groups),
        ("intermediate_size", c.quantization is None or c.intermediate_size % MXFP4_GROUP == 0, groups),
        ("eos_token_id", all(token < c.vocab_size for token in c.eos_token_ids), vocabulary),
        ("pad_token_id", c.pad_token_id is None or c.pad_token_id < c.vocab_size, vocabulary),
    )


@dataclass(frozen=True)
class GptOssConfig:
    """One gpt-oss model's numbers, named as config.json names them.

    Built by hand or by `dataclasses.replace`, it is checked as strictly as when it is read from a file.
    `eos_token_id` and `pad_token_id` are None where the file says null or nothing: transformers leaves null fields out.
    """

    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    vocab_size: int = 201_088  # 200 019 tokens and padding to a multiple of 128 and more
    sliding_window: int = 128  # keys that a query sees in a sliding layer, itself included
    layer_types: tuple[str, ...] = ()  # empty: sliding and full in turns
    rope_theta: float = 150_000.0
    rope_scaling: YarnScaling = field(default_factory=lambda: YarnScaling(**PUBLISHED_YARN))
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131_072
    swiglu_limit: float = 7.0  # up to transformers 4.57 in its code, and not in the files that it writes
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    quantization: str | None = None  # "mxfp4": the experts are stored as blocks and scales
    dtype: str | None = None  # of the other tensors, as the file says ("torch_dtype"); the tensors themselves decide
    other_eos_token_ids: tuple[int, ...] = ()  # the rest, where the file's eos_token_id is a list

    def __post_init__(self) -> None:
        check_all(self)
        if not self.layer_types:
            types = tuple(FULL if layer % 2 else SLIDING for layer in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", types)
        if not isinstance(self.rope_scaling, YarnScaling):
            refuse("rope_scaling", "expected a YarnScaling", self.rope_scaling)
        for name, holds, expected in _relations(self):
            if not holds:
                refuse(name, f"expected {expected}", getattr(self, name), "correct one of the two")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All the tokens that end an answer; empty when the file names none."""
        return () if self.eos_token_id is None else (self.eos_token_id, *self.other_eos_token_ids)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer may see, itself included; None: all that came before."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GptOssConfig:
        """Reads the content of a config.json, or the result of transformers' `to_dict`. Raises ConfigError."""
        found = read_fields(values, [field.name for field in fields(cls)])
        for name in [name for name in _ALWAYS_WRITTEN if name not in found]:
            warn_once(name, f"{name} is missing; the default of transformers' class is taken")
        if "rope_scaling" in found:
            found["rope_scaling"] = _with_floats(YarnScaling, found["rope_scaling"])
        if isinstance(found.get("layer_types"), list) and found["layer_types"]:
            found["layer_types"] = tuple(found["layer_types"])
        return _with_floats(cls, found)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> GptOssConfig:
        """Reads `path`/config.json. Raises ConfigError, which names the file."""
        directory = Path(path)
        file = config_file(directory)
        values = read_json(file, ConfigError)
        try:
            return cls.from_dict(as_stored(values, directory))
        except ConfigError as error:
            refuse_foreign(directory, values=values, files=False, field=error.field, error=ConfigError)
            raise error.at(file) from None

    def to_dict(self) -> dict[str, Any]:
        """The published (transformers 4.55) style, fields and order; transformers and vLLM read it."""
        yarn = asdict(self.rope_scaling) | {"rope_type": "yarn"}
        values = _CONSTANTS | {name: getattr(self, name) for name in _SAME_NAME}
        values |= {
            "eos_token_id": list(self.eos_token_ids) if self.other_eos_token_ids else self.eos_token_id,
            "experts_per_token": self.num_experts_per_tok,
            "initial_context_length": self.rope_scaling.original_max_position_embeddings,
            "layer_types": list(self.layer_types),
            "quantization_config": _QUANTIZATION if self.quantization else None,
            "rope_scaling": dict(sorted(yarn.items())),
            "rope_theta": int(self.rope_theta) if self.rope_theta == int(self.rope_theta) else self.rope_theta,
            "torch_dtype": self.dtype,
        }
        return {name: value for name, value in sorted(values.items()) if value is not None}


def _refuse_directory(
    directory: Path, why: str, remedy: str = "give the path of a checkpoint, or download one"
) -> NoReturn:
    raise ConfigError(Refusal(str(directory), None, f"expected a gpt-oss checkpoint, but {why}", remedy))


def _with_floats(kind: type, values: dict[str, Any]) -> Any:
    """Turns 150000 into 150000.0 where a field is a float; the rules refuse other types."""
    floats = {field.name for field in fields(kind) if field.type == "float"}
    return kind(**{name: float(v) if name in floats and is_number(v) else v for name, v in values.items()})


# Fields of the class that config.json has under the same name, as the same value
_SAME_NAME = {field.name for field in fields(GptOssConfig)} - {"quantization", "dtype", "other_eos_token_ids"}
_ALWAYS_WRITTEN = sorted(_SAME_NAME - {"swiglu_limit", "eos_token_id", "pad_token_id"})


# Short names of `published_config`
_SHORT = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "window": "sliding_window",
    "max_positions": "max_position_embeddings",
}


def published_config(layers: int = 24, *, truncate: bool = False, mxfp4: bool = False, **sizes: Any) -> GptOssConfig:
    """gpt-oss-20b in BF16 but for `sizes`: fields by their own names or by the names of _SHORT. Raises ConfigError."""
    return GptOssConfig(
        num_hidden_layers=layers,
        rope_scaling=YarnScaling(**PUBLISHED_YARN | {"truncate": truncate}),
        quantization=MXFP4 if mxfp4 else None,
        **{_SHORT.get(name, name): value for name, value in {"experts": 32, "dtype": "bfloat16", **sizes}.items()},
    )


def config_file(directory: Path) -> Path:
    """The config.json of a checkpoint's directory. Raises ConfigError, with the folder to give where it lies near."""
    file = directory / CONFIG_NAME
    if not is_directory(directory, ConfigError):
        refuse_foreign(directory, error=ConfigError)
        if directory.exists():
            _refuse_directory(directory, "this is a file", f"give its folder, {directory.parent}")
        from huggingface_hub.constants import HF_HUB_CACHE  # of tokenizers

        snapshots = Path(HF_HUB_CACHE, "--".join(("models", *directory.parts)), "snapshots")
        cached = next(iter(sorted(snapshots.glob(f"*/{CONFIG_NAME}"))), None)  # a model's name on the hub
        remedies = [f"give its folder in the hub's cache, {cached.parent}"] if cached else []
        _refuse_directory(directory, "there is no such directory", *remedies)
    if is_there(file, ConfigError):
        return file
    if is_there(directory / _ADAPTER, ConfigError):
        merge = f"merge it: `npu-gptoss convert BASE BASE-merged --lora {directory}`"
        _refuse_directory(directory, f"this is an adapter ({_ADAPTER})", merge)
    refuse_foreign(directory, error=ConfigError)
    inner = next((f for way in _INNER for f in sorted(directory.glob(f"{way}/{CONFIG_NAME}"))), None)
    remedies = [f"give the folder within it, {inner.parent}"] if inner else []
    if inner and inner.parent.name == _ORIGINAL:  # `hf download --include "original/*"`
        remedies = [f"download the rest of it, or run `{convert_command(inner.parent)}`"]
    _refuse_directory(directory, f"the directory has no {CONFIG_NAME}", *remedies)


def as_stored(values: Any, directory: Path) -> Any:
    """The content of a config.json, without a quantization_config of MXFP4 where the experts are stored in BF16.

    Fine-tuning keeps the base's config.json. transformers 5 reads such experts as BF16.
    """
    section = values.get("quantization_config") if isinstance(values, Mapping) else None
    if not isinstance(section, Mapping) or section.get("quant_method") != MXFP4:
        return values
    from npu_gptoss.model.safetensors_reader import stored_names  # not at the top: it imports torch

    if not any(name.endswith(".mlp.experts.gate_up_proj") for name in stored_names(directory)):
        return values
    warn_once("quantization_config", "quantization_config is passed over, because the experts are not quantized")
    return {name: value for name, value in values.items() if name != "quantization_config"}


def units_around(rank: int, width: int, unit: int = MXFP4_GROUP) -> tuple[int, int]:
    """[first, end) of the units that rank `rank` touches where each rank has `width` columns: the whole units around
    its own."""
    return rank * width // unit, -(-(rank + 1) * width // unit)


def packed_columns(rank: int, width: int) -> int:
    """Returns each expert's columns that rank `rank` keeps in MXFP4: the whole groups around its `width` own ones."""
    first, end = units_around(rank, width)
    return (end - first) * MXFP4_GROUP


def uncut_objection(intermediate_size: int, ranks: int) -> Refusal | None:
    """The refusal of `ranks` NVIDIA GPUs that cannot cut experts in MXFP4."""
    groups = intermediate_size // MXFP4_GROUP
    if groups % ranks == 0:
        return None
    return Refusal(
        TENSOR_PARALLEL,
        ranks,
        f"it does not divide the {groups} groups of {MXFP4_GROUP} columns of an expert in MXFP4",
        "add --enable-expert-parallel, or use fewer and --data-parallel-size for the others",
    )


def tensor_parallel_objection(config: GptOssConfig, ranks: int) -> Refusal | None:
    """The refusal of a number of ranks that vLLM's tensor parallelism cannot cut this model for; None when it can.

    vLLM copies key/value heads where there are fewer than ranks, and pads the vocabulary.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = (("query heads", heads), ("intermediate size", config.intermediate_size))
    uneven = [f"{name} {size}" for name, size in sizes if size % ranks]
    if kv_heads % ranks and ranks % kv_heads:
        uneven.append(f"key/value heads {kv_heads}")
    if uneven:
        why = f"it does not divide {' and '.join(uneven)} of this checkpoint"
        return Refusal(TENSOR_PARALLEL, ranks, why, "use 1, 2, 4 or 8")
    return None
