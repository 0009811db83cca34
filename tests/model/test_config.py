"""config.json: each field is read or refused, and a refusal names the field and the value."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.errors import Refusal
from npu_gptoss.model import config_fields
from npu_gptoss.model.config import _ALWAYS_WRITTEN, ConfigError, GptOssConfig, YarnScaling
from npu_gptoss.model.config_fields import _NO_FIELD, _UNKNOWN, RULES
from tests.model.published import gpt_oss_20b, published_config
from tests.refused import refused

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


def refusal(changes: dict[str, Any]) -> Refusal:
    with pytest.raises(ConfigError) as caught:
        GptOssConfig.from_dict(changed(changes))
    (found,) = caught.value.refusals
    assert len(str(caught.value)) < 600
    assert "expected" in found.why or found.why in [why for why, _ in (*_UNKNOWN.values(), _NO_FIELD)]
    return found


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


def test_config_written_by_transformers_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    hub = transformers.GptOssConfig.from_dict(changed({"torch_dtype": "bfloat16"}))
    want = dataclasses.replace(gpt_oss_20b(), dtype="bfloat16")
    for diff in (True, False):  # what save_pretrained writes; all fields, as `to_dict` returns them
        assert GptOssConfig.from_dict(json.loads(hub.to_json_string(use_diff=diff))) == want
    assert GptOssConfig.from_dict(hub.to_dict()) == want


def test_transformers_reads_our_config() -> None:
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
        ("experts_per_token", 2),  # neither transformers nor vLLM reads it
        ("num_experts_per_tok", ABSENT),  # its other name says the same
        ("initial_context_length", ABSENT),
        ("initial_context_length", 8192),  # nor this one
        ("_output_attentions", False),  # of a script that wrote the class's attributes
        ("hidden_act", ABSENT),
        ("attention_bias", ABSENT),
        ("tie_word_embeddings", ABSENT),
        ("architectures", None),
        ("architectures", ABSENT),
        ("architectures", []),
        ("_experts_implementation", "grouped_mm"),
        ("unsloth_tiled_mlp", True),
        ("architectures", ["FSDPGptOssForCausalLM"]),
        ("torch_dtype", None),
        ("layer_types", None),
        ("rope_scaling.attention_factor", None),
        ("rope_scaling.attention_factor", 0.1 * math.log(32) + 1),
        ("rope_scaling.type", "yarn"),
        ("rope_parameters", None),
        ("quantization_config.modules_to_not_convert", ABSENT),
        ("quantization_config.dequantize", True),
        *((name, None) for name in ("auto_map", "id2label", "label2id", "num_labels", "problem_type", "text_config")),
        *(("id2label", value) for value in (7, ["x"], {"a": 1}, {"0": "LABEL_0"})),
    ],
)
def test_fields_without_effect_leave_the_model_alone(field: str, value: Any) -> None:
    assert GptOssConfig.from_dict(changed({field: value})) == gpt_oss_20b()


ROPE, QUANTIZATION = "rope_scaling.", "quantization_config."
REQUIRED = ("model_type", ROPE + "factor", ROPE + "original_max_position_embeddings", ROPE + "rope_type")


@pytest.mark.parametrize("field", [*REQUIRED, QUANTIZATION + "quant_method"])
def test_missing_field_is_named(field: str) -> None:
    found = refusal({field: ABSENT})
    assert (found.option, found.got) == (field, None)


@pytest.mark.parametrize("field", _ALWAYS_WRITTEN)
def test_missing_number_is_that_of_transformers(field: str, caplog, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(config_fields, "_warned", set())
    values = changed(dict.fromkeys((field, "layer_types", "experts_per_token"), ABSENT))
    hub = transformers.GptOssConfig.from_dict(copy.deepcopy(values))
    config = GptOssConfig.from_dict(values)
    found, want = getattr(config, field), getattr(hub, field)
    if field == "rope_scaling":
        found = dataclasses.asdict(found)
        want = {name: value for name, value in want.items() if name in found}
    assert (list(found) if field == "layer_types" else found) == want
    assert field in caplog.text


WRONG: dict[str, tuple[Any, ...]] = {
    # types
    "vocab_size": ({}, 2**31),
    "transformers_version": (4.55,),
    "use_cache": ("yes",),
    "attention_dropout": ("none",),
    "rope_scaling": ([32.0],),
    "quantization_config": ("mxfp4",),
    # types and impossible values
    "hidden_size": ("2880", 2880.0, True, None, -2880, 2884),
    "intermediate_size": (1000,),
    "num_hidden_layers": ([24], 0, 10**6),
    "num_attention_heads": (60, int("9" * 350)),
    "num_key_value_heads": (0,),
    "head_dim": (63, 0),
    "sliding_window": (True, None, 0, 2**63),
    "max_position_embeddings": (2**31,),
    "layer_types": (
        "sliding_attention",
        ["sliding_attention", 1] * 12,
        ["sliding_attention"] * 23,
        ["sliding_attention", "chunked_attention"] * 12,
    ),
    "rope_theta": ("150000", math.nan, math.inf, 10**400, 1, 1e299),
    "rms_norm_eps": (True, [1e-05], 0, 1e200),
    "swiglu_limit": (None, -7.0, 1e200),
    "swiglu_alpha": (1.0,),
    "eos_token_id": ("200002", [], [200002, "x"], [200002, 201088], 201088),
    "pad_token_id": (1.5, 201088, 300000),
    "torch_dtype": (16, "float16"),
    "dtype": ("torch.float64",),
    ROPE + "truncate": ("false", 0),
    ROPE + "factor": ("32", 0.5),
    ROPE + "beta_fast": (None, 1.0, 0.5),
    ROPE + "original_max_position_embeddings": (4096.5,),
    ROPE + "rope_type": ("linear",),
    ROPE + "type": ("llama3",),
    ROPE + "attention_factor": (1.0,),
    ROPE + "mscale": (1.0,),
    ROPE + "mscale_all_dim": (1.0,),
    ROPE + "partial_rotary_factor": (0.5,),
    QUANTIZATION + "modules_to_not_convert": ("lm_head", [1], ["model.layers.3.mlp.experts"]),
    QUANTIZATION + "dequantize": ("no",),
    QUANTIZATION + "quant_method": ("fp8",),
    "hidden_act": ("gelu",),
    "attention_bias": (1, False),
    "tie_word_embeddings": (0, True),
    "is_encoder_decoder": (True,),
    "pruned_heads": ({"0": [1]},),
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], ["GptOssForCausalLM", "LlamaForCausalLM"]),
    # contradictions
    "num_experts": (128,),
    # unknown
    "speculators_config": (7, {}),
    "num_nextn_predict_layers": (1,),
    "auto_map": (1, {}),
    "anything": ({"structured": 1}, [1]),
    ROPE + "long_factor": (1,),
    QUANTIZATION + "bits": (1,),
    "other_eos_token_ids": (1,),
    "quantization": (1,),
    # unknown, with words of a model in their names
    "attn_logit_softcapping": (50.0,),
    "final_logit_softcapping": (30.0,),
    "use_qk_norm": (True,),
    "norm_topk_prob": (False,),
    "routed_scaling_factor": (2.5,),
    "num_shared_experts": (1,),
    "kv_lora_rank": (512,),
    "lora_alpha": (16,),
    "load_in_4bit": (True,),
    "partial_rotary_factor": (0.5,),
    "logits_scaling": (8.0,),
    "residual_multiplier": (0.2,),
    "max_window_layers": (12,),
    "image_token_id": (7,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_wrong_value_is_refused(field: str, value: Any) -> None:
    found = refusal({field: value})
    assert found.option == field
    assert found.got


def test_every_rule_of_the_table_refuses_an_object() -> None:
    """No value of config.json is an object but sections and pruned_heads, so each rule must bite."""
    assert [name for name, rule in RULES.items() if rule.holds({"a": 1})] == []
    assert [name for name, rule in RULES.items() if rule.holds(math.nan)] == []


def test_contradictions_are_refused() -> None:
    rope = published_config()["rope_scaling"]
    assert refusal({"torch_dtype": "bfloat16", "dtype": "torch.float32"}).option == "dtype"
    assert GptOssConfig.from_dict(changed({"torch_dtype": "torch.float32", "dtype": "float32"})).dtype == "float32"
    assert GptOssConfig.from_dict(changed({"rope_parameters": rope | {"rope_theta": 150000.0}})) == gpt_oss_20b()
    assert refusal({"rope_parameters": rope | {"truncate": True}}).option == "rope_parameters"
    assert refusal({"rope_parameters": rope | {"rope_theta": 10000.0}}).option == "rope_parameters.rope_theta"


def test_a_token_goes_to_no_more_experts_than_there_are() -> None:
    values = changed({"num_experts_per_tok": 32, "experts_per_token": 32})
    assert GptOssConfig.from_dict(values).num_experts_per_tok == 32
    assert refusal({"num_experts_per_tok": 33, "experts_per_token": 33}).option == "num_experts_per_tok"


def test_sizes_that_mxfp4_cannot_group_are_fine_in_bf16() -> None:
    config = GptOssConfig.from_dict(changed({"hidden_size": 2884, "quantization_config": None}))
    assert config.quantization is None


def test_original_layout_gets_a_remedy_of_its_own() -> None:
    original = {"num_hidden_layers": 24, "num_experts": 32, "rope_scaling_factor": 32.0, "swiglu_limit": 7.0}
    with refused("model_type", ConfigError) as caught:
        GptOssConfig.from_dict(original)
    other = refusal({"model_type": "llama", "rope_scaling_factor": 32.0})  # a field alone does not make it ours
    assert caught.value.refusals[0].remedy != other.remedy


def test_config_built_by_hand_is_checked_too() -> None:
    config = gpt_oss_20b()
    with refused("layer_types", ConfigError):
        dataclasses.replace(config, num_hidden_layers=2)
    with refused("hidden_size", ConfigError):
        dataclasses.replace(config, hidden_size="2880")
    with refused("rope_scaling.factor", ConfigError):
        YarnScaling(factor=0.0, original_max_position_embeddings=4096)
    with refused("config.json", ConfigError):
        GptOssConfig.from_dict([1, 2])


def test_directory_is_read_and_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published_config()))
    assert GptOssConfig.from_directory(tmp_path) == gpt_oss_20b()
    assert GptOssConfig.from_directory(str(tmp_path)) == gpt_oss_20b()
    file.write_text(json.dumps(changed({"hidden_size": 0})))
    with refused("hidden_size", ConfigError) as caught:
        GptOssConfig.from_directory(tmp_path)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"\xff\xfe{}", b"[1]", b'{"model_type": "gpt_oss", "head_dim": 1, "head_dim": 2}', b"[" * 100_000],
)
def test_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GptOssConfig.from_directory(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with refused(str(directory), ConfigError):
            GptOssConfig.from_directory(directory)
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(str(tmp_path), ConfigError) as caught:
        GptOssConfig.from_directory(tmp_path)
    assert "adapter_config.json" in caught.value.refusals[0].why
