"""Reads the fields of a gpt-oss config.json: each becomes a value, is checked and dropped, or is refused in words.

Contract: the config.json of openai/gpt-oss-20b and -120b (transformers 4.55), and what transformers writes: up to 4.57
`rope_scaling` beside `rope_theta`, `dtype` for `torch_dtype`; from 5 on `rope_parameters` holds both. The fields of
`config.GptOssConfig` are returned as they stand, and checked there. Anything that no table names is unknown: a single
value (`unsloth_version`) is passed over with one warning; refused are names that speak of a part of the model
(`_CHANGES_THE_MODEL`, `_REMEDIES`), and lists and objects of any name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from npu_gptoss.errors import InputError, quoted, short

logger = logging.getLogger(__name__)
_warned: set[str] = set()

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
MXFP4 = "mxfp4"
_CHECK_FILE = "Check that the file belongs to a gpt-oss checkpoint and is unchanged."


class ConfigError(InputError):
    """A config.json that cannot be used: names the field, what was expected, what was got and what to do."""


class _Nothing:
    def __repr__(self) -> str:
        return "nothing (the field is missing)"


MISSING = _Nothing()


def refuse(field: str, expected: str, got: object, remedy: str = _CHECK_FILE) -> NoReturn:
    """Raises ConfigError with the four parts of the sentence."""
    raise ConfigError(f"{short(field)} must be {expected}, got {quoted(got)}. {remedy}")


@dataclass(frozen=True)
class Rule:
    """What one value must be, in words and as a predicate that never raises."""

    expected: str
    holds: Callable[[Any], bool]
    remedy: str = _CHECK_FILE

    def check(self, field: str, value: object) -> None:
        if not self.holds(value):
            refuse(field, self.expected, value, self.remedy)


def ruled(rule: Rule, default: Any = NO_DEFAULT) -> Any:
    """A dataclass's field whose value must keep the rule."""
    return field(default=default, metadata={"rule": rule})


def check_rules(values: Any, prefix: str = "") -> None:
    """Every field of a dataclass of `ruled` fields. Raises ConfigError."""
    for each in fields(values):
        each.metadata["rule"].check(prefix + each.name, getattr(values, each.name))


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


LARGEST = 1e30  # of a number that the model computes with: its square is a float32


def is_number(value: object) -> bool:
    """Finite; the bounds also keep out NaN, and integers that no float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def integer(minimum: int, maximum: int = 2**31 - 1) -> Rule:
    def holds(value: object) -> bool:
        return is_int(value) and minimum <= value <= maximum

    return Rule(f"an integer of at least {minimum} and at most {maximum}", holds)


def above(minimum: float, maximum: float = LARGEST) -> Rule:
    expected = f"a finite number above {minimum:g} and at most {maximum:g}"
    return Rule(expected, lambda v: is_number(v) and minimum < v <= maximum)


NUMBER = Rule("a finite number", is_number)
BOOLEAN = Rule("true or false", lambda v: isinstance(v, bool))
TOKEN = Rule("a token id (an integer of at least 0) or null", lambda v: v is None or (is_int(v) and v >= 0))
TEXT = Rule("a text or null", lambda v: v is None or isinstance(v, str))
DTYPE = Rule(
    "'bfloat16' or 'float32' (or absent)",
    lambda v: v in (None, "bfloat16", "float32"),
    "gpt-oss was trained in bfloat16 and overflows in float16: take a bfloat16 checkpoint.",
)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's numbers, as in `rope_scaling` of config.json.

    The defaults are what transformers computes for a file without them. The published files say `truncate` false, which
    is another function (see rope.py).
    """

    factor: float = ruled(Rule("a number of at least 1 and at most 1e+06", lambda v: is_number(v) and 1 <= v <= 1e6))
    original_max_position_embeddings: int = ruled(integer(1))
    beta_fast: float = ruled(above(0, 1e6), 32.0)
    beta_slow: float = ruled(above(0, 1e6), 1.0)
    truncate: bool = ruled(BOOLEAN, True)

    def __post_init__(self) -> None:
        check_rules(self, "rope_scaling.")
        if self.beta_fast <= self.beta_slow:
            refuse("rope_scaling.beta_fast", f"above beta_slow ({self.beta_slow})", self.beta_fast)


YARN_FIELDS = tuple(each.name for each in fields(YarnScaling))

# name -> (the only value that gpt-oss has, why). Absent means this value: it is the default of transformers' class.
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "The experts' clamped SwiGLU is built on it; no other activation exists here."),
    "attention_bias": (True, "All four attention projections of gpt-oss have biases."),
    "tie_word_embeddings": (False, "gpt-oss has an lm_head of its own."),
    "swiglu_alpha": (1.702, "The kernels compute SwiGLU with this gain."),
    "is_encoder_decoder": (False, "gpt-oss is a decoder."),
    "tie_encoder_decoder": (False, "gpt-oss is a decoder."),
    "add_cross_attention": (False, "gpt-oss has no cross attention."),
    "pruned_heads": ({}, "Pruned heads are not supported: save the model without them."),
}

# Read, and without effect on inference: training, initialisation, caching, and who wrote the file.
_WITHOUT_EFFECT: dict[str, Rule] = {
    "attention_dropout": NUMBER,  # training only
    "initializer_range": NUMBER,
    "router_aux_loss_coef": NUMBER,
    "output_router_logits": BOOLEAN,
    "use_cache": BOOLEAN,
    "bos_token_id": TOKEN,  # harmony's <|start|> opens a prompt, nothing is prepended
    "transformers_version": TEXT,
    "_name_or_path": TEXT,
    "unsloth_fixed": BOOLEAN,  # set by a much used BF16 re-upload
    "attn_implementation": TEXT,  # the kernel that somebody trained with, not what it computes
    "_attn_implementation_autoset": BOOLEAN,
}

# What transformers' `to_dict` adds for every model: generation defaults (a request brings its own), labels, outputs.
_BOOKKEEPING_NAMES = """
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder label2id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_NAMES.split())

# A name with one of these words speaks of the model, not of who made it.
_WORDS_OF_THE_MODEL = """
    activation adapter alibi attention attn bias bits$ cap$ capping compress context conv_ conv1d _eps$ expert gate
    group head hidden intermediate kv_ layer lora mamba mask mlp moe mrope mtp multiplier nextn norm peft position
    predict prune quant rank_ residual rope rotary router routed scale scaling shared sink sliding softcap sparse ssm
    swiglu temperature_ tie_ token_id topk vision vocab window yarn ^load_in_ ^qk ^rms ^r$
"""
_CHANGES_THE_MODEL = re.compile("|".join(_WORDS_OF_THE_MODEL.split()), re.IGNORECASE)

_REMEDIES = {
    "auto_map": "It asks to run code from the checkpoint, which this package never does: remove the field.",
    "text_config": "It belongs to a multimodal wrapper: use the text model alone.",
}

# second name -> name: an older (experts_per_token) and a newer (num_experts) spelling, which must agree
_ALIASES = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}


def read_fields(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields of `names` that a config.json holds, unchecked, in this class's spelling.

    Always there: `quantization`, `dtype`, `rope_theta`, `rope_scaling` (a dict with some of YARN_FIELDS),
    `eos_token_id` and `other_eos_token_ids`. Raises ConfigError for every field that is not understood.
    """
    if not isinstance(values, Mapping):
        refuse("the configuration", "a JSON object", values)
    rest = dict(values)
    _check_what_is_fixed(rest)
    for name in _WITHOUT_EFFECT.keys() & rest.keys():
        _WITHOUT_EFFECT[name].check(name, rest.pop(name))
    for alias, name in _ALIASES.items():
        if alias in rest:
            value = rest.pop(alias)
            _agreed({name: rest.setdefault(name, value), alias: value})
    found: dict[str, Any] = {"quantization": _read_quantization(rest), "dtype": _read_dtype(rest)}
    found["rope_theta"], found["rope_scaling"] = _read_rope(rest)
    found["eos_token_id"], found["other_eos_token_ids"] = _read_eos(rest)
    found |= {name: rest.pop(name) for name in names if name in rest and name not in found}
    for name in sorted(rest.keys() - _BOOKKEEPING, key=str):
        _check_unknown(str(name), rest[name])
    return found


def _check_unknown(name: str, value: object) -> None:
    """Warns once in a process of a field that no part of gpt-oss reads, or refuses it."""
    known = name in _REMEDIES or _CHANGES_THE_MODEL.search(name)
    if known or not isinstance(value, (str, int, float, bool, type(None))):
        remedy = "It may change what the model computes: remove it if not, else this is another model."
        _refuse_unknown(name, "the fields of a gpt-oss config.json", value, _REMEDIES.get(name, remedy))
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "config.json: nothing reads the field %s = %s. It is no part of gpt-oss and is passed over.",
            short(name, 100),
            quoted(value),
        )


def _refuse_unknown(name: str, expected: str, value: object, remedy: str = _CHECK_FILE) -> NoReturn:
    name = short(name, 100)
    raise ConfigError(f"unknown field {name!r}: expected only {expected}, got {name} = {quoted(value)}. {remedy}")


def _check_what_is_fixed(rest: dict[str, Any]) -> None:
    """Takes the fields that have only one value out of `rest`."""
    model_type = rest.pop("model_type", MISSING)
    if model_type != MODEL_TYPE:
        remedy = "Give the directory of a gpt-oss checkpoint."
        if model_type is MISSING and "rope_scaling_factor" in rest:
            remedy = "This is OpenAI's original/ layout: give the directory above it."
        refuse("model_type", repr(MODEL_TYPE), model_type, remedy)
    architectures = rest.pop("architectures", None)
    if architectures not in (None, [ARCHITECTURE], (ARCHITECTURE,)):
        refuse("architectures", f"[{ARCHITECTURE!r}]", architectures, "Give a gpt-oss checkpoint for text generation.")
    for name, (only, why) in _FIXED.items():
        value = rest.pop(name, only)
        if type(value) is not type(only) or value != only:
            refuse(name, repr(only), value, why)


def _read_quantization(rest: dict[str, Any]) -> str | None:
    where = "quantization_config"
    section = rest.pop(where, None)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        refuse(where, "a JSON object or null", section)
    section = dict(section)
    remedy = "Use the official MXFP4 checkpoint or a BF16 one."
    method = section.pop("quant_method", MISSING)
    if method != MXFP4:
        refuse(f"{where}.quant_method", repr(MXFP4), method, remedy)
    modules = section.pop("modules_to_not_convert", None)
    modules = [] if modules is None else modules
    if not isinstance(modules, (list, tuple)) or not all(isinstance(module, str) for module in modules):
        refuse(f"{where}.modules_to_not_convert", "a list of module names or null", modules)
    experts = [module for module in modules if "experts" in module]
    if experts:
        remedy = "If the experts are not quantized, remove quantization_config."
        refuse(f"{where}.modules_to_not_convert", "free of experts (they are what MXFP4 holds)", experts, remedy)
    BOOLEAN.check(f"{where}.dequantize", section.pop("dequantize", False))  # a wish to transformers' loader
    for name in sorted(map(str, section)):
        _refuse_unknown(f"{where}.{name}", "quant_method and modules_to_not_convert", section[name], remedy)
    return MXFP4


def _read_dtype(rest: dict[str, Any]) -> str | None:
    found = {}
    for name in ("torch_dtype", "dtype"):
        value = rest.pop(name, None)
        if value is not None:
            found[name] = value.removeprefix("torch.") if isinstance(value, str) else value
            DTYPE.check(name, found[name])
    return _agreed(found) if found else None


def _read_eos(rest: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    value = rest.pop("eos_token_id", None)
    if not isinstance(value, (list, tuple)):
        return value, ()
    if not value:
        refuse("eos_token_id", "a token id or a list of at least one", value)
    for token in value:
        integer(0).check("eos_token_id", token)
    return value[0], tuple(value[1:])


def _read_rope(rest: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """rope_theta and YaRN's numbers, from `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    sections = {name: rest.pop(name, None) for name in ("rope_scaling", "rope_parameters")}
    sections = {name: section for name, section in sections.items() if section is not None}
    if not sections:
        refuse("rope_scaling", "a JSON object with YaRN's numbers", MISSING)
    thetas = {"rope_theta": rest.pop("rope_theta")} if "rope_theta" in rest else {}
    scalings = {}
    for where, section in sections.items():
        if not isinstance(section, Mapping):
            refuse(where, "a JSON object with YaRN's numbers", section)
        section = dict(section)
        if "rope_theta" in section:
            thetas[f"{where}.rope_theta"] = section.pop("rope_theta")
        scalings[where] = _read_yarn(where, section)
    if not thetas:
        refuse("rope_theta", "a finite number above 1", MISSING)
    theta, scaling = _agreed(thetas), _agreed(scalings)
    trained = scaling["original_max_position_embeddings"]
    context = rest.pop("initial_context_length", trained)
    _agreed({"rope_scaling.original_max_position_embeddings": trained, "initial_context_length": context})
    return theta, scaling


def _agreed(found: dict[str, Any]) -> Any:
    """The one value of fields that must not contradict each other."""
    (first, value), *others = found.items()
    for name, other in others:
        if other != value:
            refuse(name, f"equal to {first} ({quoted(value)})", other, "Both name one thing: remove the wrong one.")
    return value


def _read_yarn(where: str, section: dict[str, Any]) -> dict[str, Any]:
    old_type = section.pop("type", None)
    rope_type = section.pop("rope_type", MISSING if old_type is None else old_type)
    if rope_type != "yarn" or old_type not in (None, "yarn"):
        got = rope_type if rope_type != "yarn" else old_type
        refuse(f"{where}.rope_type", "'yarn'", got, "gpt-oss was trained with YaRN; no other scaling fits it.")
    part = section.pop("partial_rotary_factor", 1.0)
    if part != 1:
        refuse(f"{where}.partial_rotary_factor", "1.0", part, "gpt-oss rotates whole heads.")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = section.pop(name, None)
        if value is not None:
            refuse(f"{where}.{name}", "null or absent", value, "gpt-oss scales cos and sin by 0.1 ln(factor) + 1.")
    for name in sorted(map(str, section)):
        if name not in YARN_FIELDS:
            _refuse_unknown(f"{where}.{name}", f"YaRN's {', '.join(YARN_FIELDS)}", section[name])
    for name in ("factor", "original_max_position_embeddings"):
        if name not in section:
            refuse(f"{where}.{name}", "a number", MISSING)
    return section
