"""The table of config.json: every known field with its rule, and how a file becomes the values of `GptOssConfig`.

Contract: the config.json of openai/gpt-oss-20b and -120b (transformers 4.55), and files that transformers writes: up
to 4.57 `rope_scaling` beside `rope_theta`, `dtype` for `torch_dtype`; from 5 on `rope_parameters` holds both. A field
that the table lacks is refused when its name speaks of the model (`_SPEAKS_OF_THE_MODEL`) or its value is a list or an
object; another one (`unsloth_version`) is passed over with one warning. What transformers reads is read: `normalized`
turns its spellings into one, for this package and for vLLM, and a missing number is the one of transformers' class.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from npu_gptoss.errors import InputError, Refusal, quoted, short

logger = logging.getLogger(__name__)
_warned: set[str] = set()

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
_ARCHITECTURES = (None, [], [ARCHITECTURE], [f"FSDP{ARCHITECTURE}"])  # the last is accelerate's class around the model
MXFP4 = "mxfp4"
SLIDING, FULL = "sliding_attention", "full_attention"
_CHECK_FILE = "check that the file belongs to a gpt-oss checkpoint and is unchanged"
LARGEST = 1e30  # of a number that the model computes with: its square is a float32
MISSING = object()
ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
ROPE_FIELDS = (*ROPE_SECTIONS, "rope_theta")
PUBLISHED_YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


class ConfigError(InputError):
    """A config.json that cannot be used: names the field, the expectation, the value and the remedy."""


def refuse(field: str, why: str, got: object, remedy: str = _CHECK_FILE) -> NoReturn:
    """Raises ConfigError. got: the foreign value, or MISSING."""
    if got is MISSING:
        raise ConfigError(Refusal(field, None, f"the field is missing, {why}", remedy))
    raise ConfigError(Refusal(field, quoted(got), why, remedy, joint=" = "))


@dataclass(frozen=True)
class Rule:
    """A condition of one value: in words, and as a predicate that never raises."""

    expected: str
    holds: Callable[[Any], bool]
    remedy: str = _CHECK_FILE

    def check(self, field: str, value: object) -> None:
        if value is MISSING or not self.holds(value):
            refuse(field, f"expected {self.expected}", value, self.remedy)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Finite; the limits also keep out NaN, and integers that no float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def integer(minimum: int, maximum: int = 2**31 - 1) -> Rule:
    return Rule(f"an integer from {minimum} to {maximum}", lambda v: is_int(v) and minimum <= v <= maximum)


def above(minimum: float, maximum: float = LARGEST) -> Rule:
    expected = f"a finite number above {minimum:g} and at most {maximum:g}"
    return Rule(expected, lambda v: is_number(v) and minimum < v <= maximum)


def only(value: Any, reason: str) -> Rule:
    """The one value that gpt-oss has."""
    return Rule(f"{value!r} ({reason})", lambda v: type(v) is type(value) and v == value)


def _tuple_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, tuple) and all(map(holds, values))


def _names_without_experts(value: object) -> bool:
    names = () if value is None else value
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) and "experts" not in name for name in names)


NUMBER = Rule("a finite number", is_number)
BOOLEAN = Rule("true or false", lambda v: isinstance(v, bool))
TOKEN = Rule("a token id (an integer from 0) or null", lambda v: v is None or (is_int(v) and v >= 0))
TEXT = Rule("a text or null", lambda v: v is None or isinstance(v, str))
DTYPE = Rule(
    "'bfloat16' or 'float32', or no such field (gpt-oss was trained in bfloat16 and overflows in float16)",
    lambda v: v in (None, "bfloat16", "float32"),
    "leave the field out: the dtype of the tensors counts (docs/convert.md for float16)",
)
_NO_SCALE = Rule("null (gpt-oss scales cos and sin by 0.1 ln(factor) + 1)", lambda v: v is None)

# The numbers of `GptOssConfig`, by its names. The largest lie far above any gpt-oss, and below what would exhaust
# memory or time. A name with a dot is a field of a section.
OF_THE_MODEL: dict[str, Rule] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), integer(1, 1 << 20)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), integer(1, 1 << 16)),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), integer(1, 1 << 16)),
    "num_hidden_layers": integer(1, 1000),
    "head_dim": Rule("an even integer from 2 to 4096", lambda v: is_int(v) and 2 <= v <= 4096 and v % 2 == 0),
    "vocab_size": integer(1, 1 << 24),
    "sliding_window": integer(1),
    "layer_types": Rule(f"a list of {SLIDING!r} and {FULL!r}", _tuple_of(lambda v: v in (SLIDING, FULL))),
    "rope_theta": above(1, 1e12),
    "rms_norm_eps": above(0, 1),
    "max_position_embeddings": integer(1, 1 << 20),  # the table of rotary angles has a row for each
    "swiglu_limit": above(0),
    "eos_token_id": TOKEN,
    "other_eos_token_ids": Rule("token ids", _tuple_of(lambda v: is_int(v) and v >= 0)),
    "pad_token_id": TOKEN,
    "quantization": Rule(f"{MXFP4!r} or None", lambda v: v in (None, MXFP4)),
    "dtype": DTYPE,
    "rope_scaling.factor": Rule("a number from 1 to 1e+06", lambda v: is_number(v) and 1 <= v <= 1e6),
    "rope_scaling.original_max_position_embeddings": integer(1),
    "rope_scaling.beta_fast": above(0, 1e6),
    "rope_scaling.beta_slow": above(0, 1e6),
    "rope_scaling.truncate": BOOLEAN,
}

# Checked, and not kept. Absent means the only value: it is the default of transformers' class.
_CHECKED: dict[str, Rule] = {
    "architectures": Rule(
        f"[{ARCHITECTURE!r}]",
        lambda v: v in _ARCHITECTURES,
        f"take a checkpoint for text generation; if this is one, write [{ARCHITECTURE!r}]",
    ),
    "hidden_act": only("silu", "the experts' clamped SwiGLU is built on it"),
    "attention_bias": only(True, "all four attention projections of gpt-oss have biases"),
    "tie_word_embeddings": only(False, "gpt-oss has an lm_head of its own"),
    "swiglu_alpha": only(1.702, "the kernels compute SwiGLU with this gain"),
    "add_cross_attention": only(False, "gpt-oss has no cross attention"),
    "is_causal": Rule("True (a token sees none behind it)", lambda v: v is True, "remove it if the model writes text"),
    **dict.fromkeys(("is_encoder_decoder", "tie_encoder_decoder"), only(False, "gpt-oss is a decoder")),
    "pruned_heads": only({}, "a model with pruned heads must be saved without them"),
    **dict.fromkeys(("rope_scaling.rope_type", "rope_scaling.type"), only("yarn", "gpt-oss was trained with YaRN")),
    "rope_scaling.partial_rotary_factor": Rule("1.0 (gpt-oss rotates whole heads)", lambda v: is_number(v) and v == 1),
    **dict.fromkeys((f"rope_scaling.{name}" for name in ("attention_factor", "mscale", "mscale_all_dim")), _NO_SCALE),
    "quantization_config.quant_method": Rule(
        f"{MXFP4!r}",
        lambda v: v == MXFP4,
        "take the checkpoint that it was made from; if the experts are in BF16, remove quantization_config",
    ),
    "quantization_config.modules_to_not_convert": Rule(
        "a list of module names without experts, which MXFP4 holds, or null", _names_without_experts
    ),
    "quantization_config.dequantize": BOOLEAN,  # a wish to transformers' loader
    # no effect on inference: training, initialisation, caching, the maker of the file
    **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef"), NUMBER),
    "initial_context_length": integer(1),  # as original_max_position_embeddings, which counts: nothing reads this one
    **dict.fromkeys(("output_router_logits", "use_cache", "_attn_implementation_autoset"), BOOLEAN),
    **dict.fromkeys(("transformers_version", "_name_or_path", "attn_implementation", "_attn_implementation"), TEXT),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), TEXT),
    **dict.fromkeys(("_attn_implementation_internal", "_experts_implementation_internal"), TEXT),
    "bos_token_id": TOKEN,  # harmony's <|start|> opens a prompt, nothing is prepended
    "unsloth_fixed": BOOLEAN,  # set by a much used BF16 re-upload
}
RULES = OF_THE_MODEL | _CHECKED

# Fields that transformers' `to_dict` adds for every model, of any value: generation defaults (a request brings its
# own), labels, outputs.
_BOOKKEEPING_NAMES = """
    _output_attentions
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder label2id length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_NAMES.split())

# Parts of names that speak of the model, and not of who made it
_WORDS_OF_THE_MODEL = """
    activation adapter alibi attention attn bias bits$ cap$ capping compress context conv_ conv1d _eps$ expert gate
    group head hidden intermediate kv_ layer lora mamba mask mlp moe mrope mtp multiplier nextn norm peft position
    predict prune quant rank_ residual rope rotary router routed scale scaling shared sink sliding softcap sparse ssm
    swiglu temperature_ tie_ token_id topk vision vocab window yarn ^load_in_ ^qk ^rms ^r$
"""
_SPEAKS_OF_THE_MODEL = re.compile("|".join(_WORDS_OF_THE_MODEL.split()), re.IGNORECASE)
_UNKNOWN = {
    "auto_map": ("it asks to run code from the checkpoint, which this package never does", "remove the field"),
    "speculators_config": ("it belongs to a draft head", "give the head to --speculative-config, and this model alone"),
    "text_config": ("it belongs to a multimodal wrapper", "use the text model alone"),
}
_NO_FIELD = (
    "gpt-oss has no such field, and it may change what the model computes",
    "remove the field if it changes nothing, else this is another model",
)


def check_all(values: Any, prefix: str = "") -> None:
    """Every attribute of `values` that has a rule. Raises ConfigError."""
    for name, rule in OF_THE_MODEL.items():
        section, _, field = name.rpartition(".")
        if section == prefix:
            rule.check(name, getattr(values, field))


# Read by transformers for every model, which ends at another value; gpt-oss has no labels
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_LABELS: dict[str, Callable[[Any], bool]] = {
    "id2label": lambda v: isinstance(v, Mapping) and all(re.fullmatch(r"\d+", str(name)) for name in v),
    "label2id": lambda v: isinstance(v, Mapping),
    "num_labels": is_int,
    "problem_type": lambda v: v in _PROBLEMS,
}
_FLOATS = ("initializer_range", "rms_norm_eps", "router_aux_loss_coef", "swiglu_limit")
_ALIASES = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}


def normalized(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in the one spelling that each release of transformers and vLLM reads; wrong values stay."""
    made = dict(values)
    if made.get("architectures") in _ARCHITECTURES:
        made["architectures"] = [ARCHITECTURE]
    for name in ("torch_dtype", "dtype"):
        if isinstance(made.get(name), str):
            made[name] = made[name].removeprefix("torch.")
    for name in ("quantization_config", "layer_types", "auto_map"):
        if made.get(name, MISSING) is None:
            del made[name]
    for name, holds in _LABELS.items():
        if name in made and not holds(made[name]):
            del made[name]
    for name in _FLOATS:  # transformers 5 takes no whole number for one
        if is_int(made.get(name)) and is_number(made[name]):
            made[name] = float(made[name])
    for alias, name in _ALIASES.items():
        if alias in made:
            made.setdefault(name, made[alias])
    if "experts_per_token" in made:  # neither transformers nor vLLM reads it
        made["experts_per_token"] = made["num_experts_per_tok"]
    for name in ROPE_SECTIONS:
        section = made.get(name)
        if isinstance(section, Mapping) and _is_default_factor(section.get("attention_factor"), section.get("factor")):
            made[name] = {key: value for key, value in section.items() if key != "attention_factor"}
    return made


def _is_default_factor(attention_factor: object, factor: object) -> bool:
    numbers = is_number(attention_factor) and is_number(factor) and factor >= 1
    return numbers and math.isclose(attention_factor, 0.1 * math.log(factor) + 1, rel_tol=1e-6)


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with a user's fields. A new rope section replaces the old; rope_theta stays unless it is new."""
    made = dict(values)
    for name in ROPE_SECTIONS:
        if isinstance(section := made.get(name), Mapping) and "rope_theta" in section:
            made[name] = dict(section)
            made["rope_theta"] = made[name].pop("rope_theta")
    new = [overrides[name] for name in ROPE_SECTIONS if name in overrides]
    has_theta = any(isinstance(section, Mapping) and "rope_theta" in section for section in new)
    replaced = ROPE_FIELDS if has_theta else ROPE_SECTIONS if new else ()
    return {name: value for name, value in made.items() if name not in replaced} | dict(overrides)


def read_fields(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the fields of `names` that a config.json holds, unchecked, in the spelling of `GptOssConfig`.

    `rope_scaling` is a dict. Raises ConfigError for every other field that is wrong or not understood.
    """
    if not isinstance(values, Mapping):
        refuse("config.json", "expected a JSON object", values)
    rest = normalized(values)
    _check_model_type(rest.pop("model_type", MISSING), rest)
    found: dict[str, Any] = {"quantization": None}
    if (section := rest.pop("quantization_config", None)) is not None:
        _checked_section("quantization_config", section, required=("quant_method",))
        found["quantization"] = MXFP4
    dtypes = {name: rest.pop(name, None) for name in ("torch_dtype", "dtype")}
    dtypes = {name: value for name, value in dtypes.items() if value is not None}
    for name, value in dtypes.items():
        DTYPE.check(name, value)
    found["dtype"] = _agreed(dtypes) if dtypes else None
    found |= read_rope(rest)
    found["eos_token_id"], found["other_eos_token_ids"] = _read_eos(rest.pop("eos_token_id", None))
    for alias, name in _ALIASES.items():
        if alias in rest:
            _agreed({name: rest[name], alias: rest.pop(alias)})
    found |= {name: rest.pop(name) for name in names if name in rest and name not in found}
    for name in sorted(rest.keys() - _BOOKKEEPING, key=str):
        if name in _CHECKED:
            _CHECKED[name].check(name, rest[name])
        else:
            _check_unknown(str(name), rest[name])
    return found


def _check_model_type(model_type: object, rest: Mapping[str, Any]) -> None:
    if model_type == MODEL_TYPE:
        return
    remedy = f"give the directory of a gpt-oss checkpoint; if this is one, write {MODEL_TYPE!r}"
    if model_type is MISSING and "rope_scaling_factor" in rest:
        remedy = "give the directory above this one, which is OpenAI's original/ layout"
    refuse("model_type", f"expected {MODEL_TYPE!r}", model_type, remedy)


def _checked_section(where: str, section: object, required: Collection[str], rules_of: str = "") -> dict[str, Any]:
    """A copy of a section whose fields keep the rules of `rules_of`.name (default: `where`)."""
    if not isinstance(section, Mapping):
        refuse(where, "expected a JSON object", section)
    prefix = (rules_of or where) + "."
    rules = {name.removeprefix(prefix): rule for name, rule in RULES.items() if name.startswith(prefix)}
    for name in required:
        rules[name].check(f"{where}.{name}", section.get(name, MISSING))
    for name, value in section.items():
        if name not in rules:
            refuse(f"{where}.{name}", f"expected only {', '.join(rules)}", value)
        rules[name].check(f"{where}.{name}", value)
    return dict(section)


def read_rope(rest: dict[str, Any]) -> dict[str, Any]:
    """Takes out of `rest`, and returns, `rope_theta` and YaRN's numbers as `rope_scaling`, as far as they are there.

    transformers 5 has both in `rope_parameters`. Raises ConfigError.
    """
    thetas = {"rope_theta": rest.pop("rope_theta")} if "rope_theta" in rest else {}
    scalings = {}
    if "rope_scaling" in rest and not any(rest.get(where) for where in ROPE_SECTIONS):
        # transformers 4 reads null as no scaling at all, transformers 5 as its default
        section = json.dumps({"rope_type": "yarn", **PUBLISHED_YARN})
        refuse("rope_scaling", "expected YaRN's numbers", rest["rope_scaling"], f"write {section}, as gpt-oss has it")
    for where in ROPE_SECTIONS:
        if (section := rest.pop(where, None)) is None:
            continue
        if isinstance(section, Mapping):
            section = dict(section)
            if "rope_theta" in section:
                thetas[f"{where}.rope_theta"] = section.pop("rope_theta")
            if section.get("type") is not None:
                section.setdefault("rope_type", section["type"])
            else:
                section.pop("type", None)
        required = ("rope_type", "factor", "original_max_position_embeddings")
        yarn = _checked_section(where, section, required, rules_of="rope_scaling")
        scalings[where] = {name: value for name, value in yarn.items() if f"rope_scaling.{name}" in OF_THE_MODEL}
    for name, theta in thetas.items():
        OF_THE_MODEL["rope_theta"].check(name, theta)
    agreed = {"rope_theta": thetas, "rope_scaling": scalings}
    return {name: _agreed(values) for name, values in agreed.items() if values}


def _read_eos(value: object) -> tuple[Any, tuple[Any, ...]]:
    """Returns the first end token and the others; a file has one or a list."""
    if not isinstance(value, (list, tuple)):
        return value, ()
    if not value:
        refuse("eos_token_id", "expected a token id or a list of at least one", value)
    for token in value:
        integer(0).check("eos_token_id", token)
    return value[0], tuple(value[1:])


def _agreed(found: dict[str, Any]) -> Any:
    """The one value of fields that must not contradict each other."""
    (first, value), *others = found.items()
    for name, other in others:
        if other != value:
            refuse(name, f"expected the value of {first} ({quoted(value)})", other, "remove the wrong one of the two")
    return value


def _check_unknown(name: str, value: object) -> None:
    """Refuses a field that may change the model; warns of another one, once in a process. null changes nothing."""
    known = name in _UNKNOWN or (_SPEAKS_OF_THE_MODEL.search(name) and not name.startswith("unsloth_"))  # its notes
    if value is not None and (known or not isinstance(value, (str, int, float, bool))):
        why, remedy = _UNKNOWN.get(name, _NO_FIELD)
        refuse(short(name, 100), why, value, remedy)
    warn_once(
        name,
        f"nothing reads the field {short(name, 100)} = {quoted(value)}. It is no part of gpt-oss and is passed over.",
    )


def warn_once(field: str, said: str) -> None:
    """Logs a sentence about a field once in a process."""
    if field not in _warned:
        _warned.add(field)
        logger.warning("config.json: %s", said)
