"""The numbers that define one gpt-oss model, read from a checkpoint's config.json completely or refused in words.

`config_fields.py` sorts the file's fields; the rules and relations here are what their values must be, and hold for
every `GptOssConfig`, however it is built. A field with a default may be absent: transformers takes the same value then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from npu_gptoss.files import is_directory, is_there, read_json
from npu_gptoss.model.config_fields import (
    ARCHITECTURE,
    DTYPE,
    MISSING,
    MODEL_TYPE,
    MXFP4,
    TOKEN,
    ConfigError,
    Rule,
    YarnScaling,
    above,
    check_rules,
    integer,
    is_int,
    is_number,
    read_fields,
    refuse,
    ruled,
)

CONFIG_NAME = "config.json"
_ADAPTER = "adapter_config.json"
_EXPECTED, _GIVE = "expected a gpt-oss checkpoint", "Give the path of a checkpoint, or download one."
SLIDING, FULL = "sliding_attention", "full_attention"
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
# What the published files say beside the numbers of `GptOssConfig`
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

_HEAD_DIM = Rule(
    "an even integer of at least 2 (rotary halves) and at most 4096",
    lambda v: is_int(v) and 2 <= v <= 4096 and v % 2 == 0,
)
_LAYER_TYPES = Rule(
    f"a list that holds only {SLIDING!r} and {FULL!r}",
    lambda v: isinstance(v, tuple) and all(kind in (SLIDING, FULL) for kind in v),
)
_TOKENS = Rule("token ids", lambda v: isinstance(v, tuple) and all(is_int(i) and i >= 0 for i in v))
_YARN = Rule("a YarnScaling", lambda v: isinstance(v, YarnScaling))
_ONE_OF_TWO = "Correct one of the two."


def _relations(c: GptOssConfig) -> tuple[tuple[str, bool, str, str], ...]:
    """Field, whether what must hold between it and others does, the expectation, what to do."""
    in_mxfp4 = f"a multiple of {MXFP4_GROUP} in an MXFP4 checkpoint"
    vocabulary = f"below vocab_size ({c.vocab_size})"
    remedy = f"An MXFP4 scale covers {MXFP4_GROUP} values: change the size or use the BF16 layout."
    return (
        (
            "num_attention_heads",
            c.num_attention_heads % c.num_key_value_heads == 0,
            f"a multiple of num_key_value_heads ({c.num_key_value_heads})",
            f"Each key/value head serves the same number of query heads. {_ONE_OF_TWO}",
        ),
        (
            "num_experts_per_tok",
            c.num_experts_per_tok <= c.num_local_experts,
            f"at most num_local_experts ({c.num_local_experts})",
            _ONE_OF_TWO,
        ),
        (
            "layer_types",
            len(c.layer_types) == c.num_hidden_layers,
            f"as long as num_hidden_layers ({c.num_hidden_layers})",
            "List one type for each layer.",
        ),
        *(
            (name, c.quantization is None or getattr(c, name) % MXFP4_GROUP == 0, in_mxfp4, remedy)
            for name in ("hidden_size", "intermediate_size")
        ),
        ("eos_token_id", all(token < c.vocab_size for token in c.eos_token_ids), vocabulary, _ONE_OF_TWO),
        ("pad_token_id", c.pad_token_id is None or c.pad_token_id < c.vocab_size, vocabulary, _ONE_OF_TWO),
    )


@dataclass(frozen=True)
class GptOssConfig:
    """One gpt-oss model's numbers, named as config.json names them.

    Built by hand or by `dataclasses.replace`, it is checked as strictly as when it is read from a file.
    `eos_token_id` and `pad_token_id` are None where the file says null or nothing: transformers leaves null fields out.
    """

    # The largest values lie far above any gpt-oss, and below what would exhaust memory or time by itself.
    hidden_size: int = ruled(integer(1, 1 << 20))
    intermediate_size: int = ruled(integer(1, 1 << 20))
    num_hidden_layers: int = ruled(integer(1, 1000))
    num_attention_heads: int = ruled(integer(1, 1 << 16))
    num_key_value_heads: int = ruled(integer(1, 1 << 16))
    head_dim: int = ruled(_HEAD_DIM)
    num_local_experts: int = ruled(integer(1, 1 << 16))
    num_experts_per_tok: int = ruled(integer(1, 1 << 16))
    vocab_size: int = ruled(integer(1, 1 << 24))
    sliding_window: int = ruled(integer(1))  # keys that a query sees in a sliding layer, itself included
    layer_types: tuple[str, ...] = ruled(_LAYER_TYPES)
    rope_theta: float = ruled(above(1, 1e12))
    rope_scaling: YarnScaling = ruled(_YARN)  # noqa: RUF009  # makes a field
    rms_norm_eps: float = ruled(above(0, 1))
    max_position_embeddings: int = ruled(integer(1, 1 << 20))  # the table of rotary angles has a row for each
    # Up to transformers 4.57 this stands in its code, not in the files that it writes.
    swiglu_limit: float = ruled(above(0), 7.0)
    eos_token_id: int | None = ruled(TOKEN, None)
    pad_token_id: int | None = ruled(TOKEN, None)
    # "mxfp4": the experts are stored as blocks and scales
    quantization: str | None = ruled(Rule(f"{MXFP4!r} or None", lambda v: v in (None, MXFP4)), None)
    # what the file says of the other tensors ("torch_dtype"); the tensors themselves decide
    dtype: str | None = ruled(DTYPE, None)
    other_eos_token_ids: tuple[int, ...] = ruled(_TOKENS, ())  # the rest, where the file's eos_token_id is a list

    def __post_init__(self) -> None:
        check_rules(self)
        for name, holds, expected, remedy in _relations(self):
            if not holds:
                refuse(name, expected, getattr(self, name), remedy)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All the tokens that end an answer; empty when the file names none."""
        return () if self.eos_token_id is None else (self.eos_token_id, *self.other_eos_token_ids)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer may see, itself included; None: all that came before."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GptOssConfig:
        """Reads the content of a config.json, or what transformers' `to_dict` returns. Raises ConfigError."""
        found = read_fields(values, [field.name for field in fields(cls)])
        for field in fields(cls):
            if field.name not in found and field.default is NO_DEFAULT:
                refuse(field.name, field.metadata["rule"].expected, MISSING)
        found["rope_scaling"] = _with_floats(YarnScaling, found["rope_scaling"])
        if isinstance(found["layer_types"], list):
            found["layer_types"] = tuple(found["layer_types"])
        return _with_floats(cls, found)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> GptOssConfig:
        """Reads `path`/config.json. Raises ConfigError, which names the file."""
        directory = Path(path)
        file = directory / CONFIG_NAME
        if not is_directory(directory, ConfigError):
            raise ConfigError(f"{directory}: {_EXPECTED}, but there is no such directory. {_GIVE}")
        if not is_there(file, ConfigError):
            if is_there(directory / _ADAPTER, ConfigError):
                raise ConfigError(
                    f"{directory}: {_EXPECTED}, but this is an adapter ({_ADAPTER}). Merge it into its base model."
                )
            raise ConfigError(f"{directory}: {_EXPECTED}, but the directory has no {CONFIG_NAME}. {_GIVE}")
        values = read_json(file, ConfigError)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

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


def _with_floats(kind: type, values: dict[str, Any]) -> Any:
    """A file may write 150000 for 150000.0; what is no number is left for the rules to refuse."""
    floats = {field.name for field in fields(kind) if field.type == "float"}
    return kind(**{name: float(v) if name in floats and is_number(v) else v for name, v in values.items()})


# Fields of the class that config.json has under the same name, as the same value
_SAME_NAME = {field.name for field in fields(GptOssConfig)} - {"quantization", "dtype", "other_eos_token_ids"}


# The sizes of gpt-oss-20b, by the short names of `published_config` where they have one
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
_PUBLISHED = {
    "hidden": 2880,
    "intermediate": 2880,
    "experts": 32,
    "experts_per_token": 4,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "window": 128,
    "max_positions": 131_072,
    "vocab_size": 201_088,  # 200 019 tokens and padding to a multiple of 128 and more
    "rope_theta": 150_000.0,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def published_config(layers: int = 24, *, truncate: bool = False, mxfp4: bool = False, **sizes: Any) -> GptOssConfig:
    """gpt-oss-20b in BF16 but for `sizes`: fields by their own names or those of _SHORT. Raises ConfigError."""
    return GptOssConfig(
        num_hidden_layers=layers,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
        rope_scaling=YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=truncate),
        quantization=MXFP4 if mxfp4 else None,
        **{_SHORT.get(name, name): value for name, value in {**_PUBLISHED, **sizes}.items()},
    )


def units_around(rank: int, width: int, unit: int = MXFP4_GROUP) -> tuple[int, int]:
    """[first, end) of the units that rank `rank` touches where each rank has `width` columns: the whole units around
    its own."""
    return rank * width // unit, -(-(rank + 1) * width // unit)


def packed_columns(rank: int, width: int) -> int:
    """Of each expert where rank `rank` keeps its `width` columns in MXFP4: the whole groups around them."""
    first, end = units_around(rank, width)
    return (end - first) * MXFP4_GROUP


def uncut_objection(intermediate_size: int, ranks: int) -> str | None:
    """Why `ranks` NVIDIA GPUs cannot cut experts that stay in MXFP4, and vLLM's option that deals them out."""
    groups = intermediate_size // MXFP4_GROUP
    if groups % ranks == 0:
        return None
    return (
        f"--tensor-parallel-size {ranks}: it does not divide the {groups} groups of {MXFP4_GROUP} columns that an "
        "expert in MXFP4 has; add --enable-expert-parallel, which deals experts out whole"
    )


def tensor_parallel_objection(config: GptOssConfig, ranks: int) -> str | None:
    """Why vLLM's tensor parallelism cannot cut this model for `ranks` ranks; None when it can.

    vLLM copies key/value heads where there are fewer than ranks, and pads the vocabulary.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = (("query heads", heads), ("intermediate size", config.intermediate_size))
    uneven = [f"{name} {size}" for name, size in sizes if size % ranks]
    if kv_heads % ranks and ranks % kv_heads:
        uneven.append(f"key/value heads {kv_heads}")
    if uneven:
        return f"--tensor-parallel-size {ranks} does not divide {' and '.join(uneven)} of this checkpoint"
    return None
