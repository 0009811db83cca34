"""config.json: every field is read or refused, and each refusal says field, expected, got and what to do."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import ConfigError, GptOssConfig, YarnScaling
from tests.model.published import gpt_oss_20b, published_config

ABSENT = object()


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The published file with some fields set, or removed (ABSENT); a dot goes into a section."""
    values = copy.deepcopy(published_config())
    for path, value in changes.items():
        *sections, name = path.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        if value is ABSENT:
            target.pop(name, None)
        else:
            target[name] = value
    return values


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        GptOssConfig.from_dict(changed(changes))
    text = str(caught.value)
    assert re.search(r"must be .+, got .+\. \S.+\.$|expected only .+, got .+\. \S.+\.$", text, re.DOTALL), text
    return text


@pytest.mark.parametrize(("layers", "experts"), [(24, 32), (36, 128)])
def test_published_config_is_read_and_written_back_unchanged(layers: int, experts: int) -> None:
    published = published_config(layers, experts)
    config = GptOssConfig.from_dict(published)
    assert config.to_dict() == published
    assert list(config.to_dict()) == list(published)
    assert (config.num_hidden_layers, config.num_local_experts, config.quantization) == (layers, experts, "mxfp4")
    assert config.rope_scaling == YarnScaling(32.0, 4096, 32.0, 1.0, truncate=False)
    assert (config.swiglu_limit, config.rope_theta, config.rms_norm_eps) == (7.0, 150000.0, 1e-5)
    assert config.eos_token_ids == (200002,)
    assert config.dtype is None


def test_a_bf16_config_of_another_base_is_written_and_read_back_alike() -> None:
    config = dataclasses.replace(gpt_oss_20b(), quantization=None, rope_theta=123456.5, dtype="bfloat16")
    values = config.to_dict()
    assert "quantization_config" not in values
    assert GptOssConfig.from_dict(values) == config


def test_layers_alternate_between_128_keys_and_all_keys() -> None:
    config = gpt_oss_20b()
    assert [config.window(layer) for layer in range(4)] == [128, None, 128, None]
    reverse = GptOssConfig.from_dict(changed({"layer_types": ["full_attention", "sliding_attention"] * 12}))
    assert [reverse.window(layer) for layer in range(4)] == [None, 128, None, 128]


def test_what_transformers_writes_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    hub = transformers.GptOssConfig.from_dict(changed({"torch_dtype": "bfloat16"}))
    want = dataclasses.replace(gpt_oss_20b(), dtype="bfloat16")
    for diff in (True, False):  # what save_pretrained writes; all fields, as `to_dict` returns them
        assert GptOssConfig.from_dict(json.loads(hub.to_json_string(use_diff=diff))) == want
    assert GptOssConfig.from_dict(hub.to_dict()) == want


def test_transformers_reads_what_is_written() -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(gpt_oss_20b(), dtype="float32", quantization=None)
    hub = transformers.GptOssConfig.from_dict(config.to_dict())
    for field in dataclasses.fields(GptOssConfig):
        if field.name in ("quantization", "dtype", "other_eos_token_ids", "rope_scaling", "layer_types"):
            continue
        assert getattr(hub, field.name) == getattr(config, field.name), field.name
    assert hub.layer_types == list(config.layer_types)
    assert {k: v for k, v in hub.rope_scaling.items() if k != "rope_type"} == dataclasses.asdict(config.rope_scaling)


def test_a_config_that_transformers_makes_from_sizes_is_read() -> None:
    """It has no swiglu_limit (7.0 stands in transformers' code) and no token ids."""
    transformers = pytest.importorskip("transformers")
    hub = transformers.GptOssConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=512)
    config = GptOssConfig.from_dict(json.loads(hub.to_json_string()))
    assert (config.swiglu_limit, config.eos_token_id, config.pad_token_id) == (7.0, None, None)
    assert config.eos_token_ids == ()


def test_transformers_5_rope_parameters_are_read() -> None:
    published = published_config()
    rope = published.pop("rope_scaling") | {"rope_theta": published.pop("rope_theta")}
    published["rope_parameters"] = rope
    published["dtype"] = "bfloat16"
    published["swiglu_alpha"] = 1.702
    assert GptOssConfig.from_dict(published) == dataclasses.replace(gpt_oss_20b(), dtype="bfloat16")


def test_yarn_without_truncate_rounds_as_transformers_does() -> None:
    config = GptOssConfig.from_dict(changed({"rope_scaling.truncate": ABSENT}))
    assert config.rope_scaling.truncate is True
    assert gpt_oss_20b().rope_scaling.truncate is False
    defaults = GptOssConfig.from_dict(changed({"rope_scaling.beta_fast": ABSENT, "rope_scaling.beta_slow": ABSENT}))
    assert defaults == gpt_oss_20b()


def test_whole_numbers_stand_for_floats() -> None:
    changes = {"rope_theta": 150000, "swiglu_limit": 7, "rope_scaling.factor": 32, "rope_scaling.beta_fast": 32}
    config = GptOssConfig.from_dict(changed(changes))
    yarn = config.rope_scaling
    for value in (config.rope_theta, config.swiglu_limit, yarn.factor, yarn.beta_fast):
        assert isinstance(value, float)


def test_list_of_end_tokens_is_kept_whole() -> None:
    config = GptOssConfig.from_dict(changed({"eos_token_id": [200002, 199999, 200012]}))
    assert config.eos_token_id == 200002
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert GptOssConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_dropout", 0.1),
        ("initializer_range", 1),
        ("router_aux_loss_coef", 0.0),
        ("output_router_logits", True),
        ("use_cache", False),
        ("transformers_version", "5.0.0"),
        ("bos_token_id", 199998),
        ("unsloth_fixed", True),
        ("_name_or_path", "somewhere"),
        ("temperature", 0.3),
        ("experts_per_token", ABSENT),
        ("initial_context_length", ABSENT),
        ("hidden_act", ABSENT),
        ("attention_bias", ABSENT),
        ("tie_word_embeddings", ABSENT),
        ("architectures", None),
        ("rope_scaling.attention_factor", None),
        ("rope_scaling.type", "yarn"),
        ("rope_parameters", None),
        ("quantization_config.modules_to_not_convert", ABSENT),
        ("quantization_config.dequantize", True),
    ],
)
def test_fields_without_effect_leave_the_model_alone(field: str, value: Any) -> None:
    assert GptOssConfig.from_dict(changed({field: value})) == gpt_oss_20b()


# num_experts_per_tok has a second spelling: the next test
REQUIRED = [
    *(f.name for f in dataclasses.fields(GptOssConfig) if f.default is dataclasses.MISSING),
    *("model_type", "rope_scaling.factor", "rope_scaling.original_max_position_embeddings", "rope_scaling.rope_type"),
    "quantization_config.quant_method",
]
REQUIRED.remove("num_experts_per_tok")


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_field_is_named(field: str) -> None:
    text = refusal({field: ABSENT})
    assert text.startswith(field)
    assert "got nothing (the field is missing)" in text


def test_missing_number_of_experts_per_token_is_named_when_both_spellings_are_missing() -> None:
    assert refusal({"num_experts_per_tok": ABSENT, "experts_per_token": ABSENT}).startswith("num_experts_per_tok")


WRONG_TYPES: dict[str, tuple[Any, ...]] = {
    "hidden_size": ("2880", 2880.0, True, None),
    "sliding_window": (True, None),
    "num_hidden_layers": ([24],),
    "vocab_size": ({},),
    "layer_types": ("sliding_attention", ["sliding_attention", 1] * 12),
    "rope_theta": ("150000", math.nan, math.inf, 10**400),
    "rms_norm_eps": (True, [1e-05]),
    "swiglu_limit": (None,),
    "eos_token_id": ("200002", [], [200002, "x"]),
    "pad_token_id": (1.5,),
    "torch_dtype": (16,),
    "rope_scaling": ([32.0],),
    "rope_scaling.truncate": ("false", 0),
    "rope_scaling.factor": ("32",),
    "rope_scaling.beta_fast": (None,),
    "rope_scaling.original_max_position_embeddings": (4096.5,),
    "quantization_config": ("mxfp4",),
    "quantization_config.modules_to_not_convert": ("lm_head", [1]),
    "attention_dropout": ("none",),
    "use_cache": ("yes",),
    "transformers_version": (4.55,),
    "attention_bias": (1,),
    "tie_word_embeddings": (0,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG_TYPES for value in WRONG_TYPES[field]])
def test_wrong_type_is_refused(field: str, value: Any) -> None:
    changes = {field: value}
    if field == "rope_scaling.original_max_position_embeddings":
        changes["initial_context_length"] = value
    assert refusal(changes).startswith(field)


IMPOSSIBLE = [
    ("num_attention_heads", 60, r"multiple of num_key_value_heads \(8\), got 60"),
    ("num_key_value_heads", 0, "at least 1"),
    ("head_dim", 63, "even"),
    ("hidden_size", -2880, "at least 1"),
    ("hidden_size", 2884, "multiple of 32 in an MXFP4 checkpoint"),
    ("intermediate_size", 1000, "multiple of 32 in an MXFP4 checkpoint"),
    ("layer_types", ["sliding_attention"] * 23, r"as long as num_hidden_layers \(24\)"),
    ("layer_types", ["sliding_attention", "chunked_attention"] * 12, "'sliding_attention' and 'full_attention'"),
    ("num_hidden_layers", 0, "at least 1"),
    ("sliding_window", 0, "at least 1"),
    ("rms_norm_eps", 0, "above 0"),
    ("swiglu_limit", -7.0, "above 0"),
    ("swiglu_alpha", 1.0, "must be 1.702"),
    ("rope_theta", 1, "above 1"),
    ("rope_scaling.factor", 0.5, "at least 1"),
    ("rope_scaling.beta_fast", 1.0, r"above beta_slow \(1.0\), got 1.0"),
    ("rope_scaling.beta_fast", 0.5, r"above beta_slow \(1.0\)"),
    ("rope_scaling.rope_type", "linear", "'yarn'"),
    ("rope_scaling.type", "llama3", "'yarn', got 'llama3'"),
    ("rope_scaling.attention_factor", 1.0, "null or absent"),
    ("rope_scaling.mscale", 1.0, "null or absent"),
    ("rope_scaling.mscale_all_dim", 1.0, "null or absent"),
    ("rope_scaling.partial_rotary_factor", 0.5, "must be 1.0"),
    ("initial_context_length", 8192, r"original_max_position_embeddings \(4096\), got 8192"),
    ("experts_per_token", 2, r"equal to num_experts_per_tok \(4\)"),
    ("num_experts", 128, r"equal to num_local_experts \(32\)"),
    ("hidden_act", "gelu", "'silu'"),
    ("attention_bias", False, "must be True"),
    ("tie_word_embeddings", True, "must be False"),
    ("is_encoder_decoder", True, "must be False"),
    ("pruned_heads", {"0": [1]}, "must be {}"),
    ("model_type", "llama", "'gpt_oss'"),
    ("architectures", ["LlamaForCausalLM"], "GptOssForCausalLM"),
    ("architectures", ["GptOssForCausalLM", "LlamaForCausalLM"], r"must be \['GptOssForCausalLM'\]"),
    ("quantization_config.dequantize", "no", "true or false"),
    ("quantization_config.quant_method", "fp8", "'mxfp4'"),
    ("quantization_config.modules_to_not_convert", ["model.layers.3.mlp.experts"], "free of experts"),
    ("torch_dtype", "float16", "overflows in float16"),
    ("dtype", "torch.float64", "'bfloat16' or 'float32' .*, got 'float64'"),
    ("eos_token_id", [200002, 201088], r"below vocab_size \(201088\)"),
    ("eos_token_id", 201088, r"below vocab_size \(201088\)"),
    ("pad_token_id", 201088, r"below vocab_size \(201088\)"),
    ("pad_token_id", 300000, r"below vocab_size \(201088\)"),
]


@pytest.mark.parametrize(("field", "value", "expected"), IMPOSSIBLE)
def test_impossible_value_is_refused(field: str, value: Any, expected: str) -> None:
    text = refusal({field: value})
    assert text.startswith("rope_scaling.rope_type" if field == "rope_scaling.type" else field), text
    assert re.search(expected, text), text


def test_contradicting_dtypes_are_refused() -> None:
    assert "dtype must be equal to torch_dtype ('bfloat16'), got 'float32'" in refusal(
        {"torch_dtype": "bfloat16", "dtype": "torch.float32"}
    )
    assert GptOssConfig.from_dict(changed({"torch_dtype": "torch.float32", "dtype": "float32"})).dtype == "float32"


def test_a_token_goes_to_no_more_experts_than_there_are() -> None:
    values = changed({"num_experts_per_tok": 32, "experts_per_token": 32})
    assert GptOssConfig.from_dict(values).num_experts_per_tok == 32
    text = refusal({"num_experts_per_tok": 33, "experts_per_token": 33})
    assert "num_experts_per_tok must be at most num_local_experts (32), got 33" in text


def test_sizes_that_mxfp4_cannot_group_are_fine_in_bf16() -> None:
    config = GptOssConfig.from_dict(changed({"hidden_size": 2884, "quantization_config": None}))
    assert config.quantization is None


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("num_nextn_predict_layers", "remove it if not, else this is another model"),
        ("auto_map", "never does"),
        ("rope_scaling.long_factor", "YaRN's"),
        ("quantization_config.bits", "quant_method and modules_to_not_convert"),
        ("other_eos_token_ids", "gpt-oss config.json"),
        ("quantization", "gpt-oss config.json"),
    ],
)
def test_unknown_field_is_refused_not_ignored(field: str, hint: str) -> None:
    text = refusal({field: 1})
    assert f"unknown field '{field}'" in text
    assert hint in text


def test_contradicting_rope_sections_are_refused() -> None:
    rope = published_config()["rope_scaling"]
    assert GptOssConfig.from_dict(changed({"rope_parameters": rope | {"rope_theta": 150000.0}})) == gpt_oss_20b()
    assert "rope_parameters must be equal to rope_scaling" in refusal({"rope_parameters": rope | {"truncate": True}})
    assert "rope_parameters.rope_theta must be equal to rope_theta (150000)" in refusal(
        {"rope_parameters": rope | {"rope_theta": 10000.0}}
    )


def test_original_layout_is_told_from_another_model() -> None:
    original = {"num_hidden_layers": 24, "num_experts": 32, "rope_scaling_factor": 32.0, "swiglu_limit": 7.0}
    with pytest.raises(ConfigError, match="original/ layout: give the directory above it"):
        GptOssConfig.from_dict(original)
    text = refusal({"model_type": "llama", "rope_scaling_factor": 32.0})  # a field alone does not make it ours
    assert text.endswith("Give the directory of a gpt-oss checkpoint.")


def test_config_built_by_hand_is_checked_too() -> None:
    config = gpt_oss_20b()
    with pytest.raises(ConfigError, match="layer_types must be as long as num_hidden_layers"):
        dataclasses.replace(config, num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"hidden_size must be an integer of at least 1 and at most \d+, got '2880'"):
        dataclasses.replace(config, hidden_size="2880")
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor"):
        YarnScaling(factor=0.0, original_max_position_embeddings=4096)
    with pytest.raises(ConfigError, match="JSON object"):
        GptOssConfig.from_dict([1, 2])


def test_directory_is_read_and_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published_config()))
    assert GptOssConfig.from_directory(tmp_path) == gpt_oss_20b()
    assert GptOssConfig.from_directory(str(tmp_path)) == gpt_oss_20b()
    file.write_text(json.dumps(changed({"hidden_size": 0})))
    with pytest.raises(InputError, match=re.escape(f"{file}: hidden_size must be")):
        GptOssConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "expected JSON"),
        (b"", "expected JSON"),
        (b"\xff\xfe{}", "expected JSON in UTF-8"),
        (b"[1]", "must be a JSON object, got"),
        (
            b'{"model_type": "gpt_oss", "hidden_size": 1, "hidden_size": 2}',
            "'hidden_size' is there twice",
        ),
        (b"[" * 100_000, "expected JSON"),
    ],
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        GptOssConfig.from_directory(tmp_path)
    assert "config.json" in str(caught.value)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        GptOssConfig.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        GptOssConfig.from_directory(tmp_path / "nowhere")
