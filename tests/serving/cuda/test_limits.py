"""Options of vLLM 0.33 that the model for NVIDIA GPUs cannot serve are refused at the start, each by its name."""

from __future__ import annotations

from types import SimpleNamespace as Having
from typing import Any

import pytest

from npu_gptoss.errors import asked_for
from npu_gptoss.serving.cuda import limits


def config_of(**changes: Any) -> Having:
    """The parts of VllmConfig that the checks read."""
    parts = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 2,
            "enable_expert_parallel": False,
            "data_parallel_size": 2,
            "prefill_context_parallel_size": 1,
            "ubatch_size": 0,
        },
        "model_config": {
            "enable_prompt_embeds": False,
            "max_model_len": 131072,
            "hf_config": Having(max_position_embeddings=131072, intermediate_size=2880),
        },
        "load_config": {"load_format": "auto"},
        "cache_config": {"cache_dtype": "auto", "kv_cache_dtype_skip_layers": []},
        "offload_config": {"uva": Having(cpu_offload_gb=0), "prefetch": Having(offload_group_size=0)},
    }
    whole = {
        "use_v2_model_runner": True,
        "weight_transfer_config": None,
        "lora_config": None,
        "speculative_config": None,
    }
    for name, value in changes.items():
        next((part for part in parts.values() if name in part), whole)[name] = value
    return Having(**{name: Having(**part) for name, part in parts.items()}, **whole)


def refused(config: Having) -> list[str]:
    """The refused settings, as a user writes them."""
    return [refusal.asked for refusal in asked_for(limits.checks(config))]


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"weight_transfer_config": Having(backend="sharded_rdt")}, "--weight-transfer-config sharded_rdt"),
        ({"ubatch_size": 2}, "--ubatch-size 2"),
        # vLLM's attention layers read it, of which our model has none
        ({"kv_cache_dtype_skip_layers": ["0", "1"]}, "--kv-cache-dtype-skip-layers 0 1"),
        # vLLM moves parameters, and our weights are none, so it silently moved nothing
        ({"uva": Having(cpu_offload_gb=4)}, "--cpu-offload-gb 4"),
        ({"prefetch": Having(offload_group_size=2)}, "--offload-group-size 2"),
        # VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 accepts it: the device would read behind the table of rotary angles
        ({"max_model_len": 131073}, "--max-model-len 131073"),
        ({"lora_config": Having(target_modules=None, enable_moe_shared_loras=False)}, "--enable-lora"),  # on two GPUs
    ],
)
def test_an_option_that_cannot_be_served_is_refused_by_name(change: dict[str, Any], option: str) -> None:
    assert refused(config_of()) == []
    assert refused(config_of(**change)) == [option]


def test_batch_invariance_is_refused_where_it_was_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.INVARIANT, "1")
    alone = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    assert refused(config_of(**alone)) == []
    lora = Having(target_modules=None, enable_moe_shared_loras=False)
    changes = {"tensor_parallel_size": 2, "speculative_config": Having(), "lora_config": lora, "cache_dtype": "fp8"}
    for change in ({name: value} for name, value in changes.items()):
        assert refused(config_of(**alone | change))[0] == "VLLM_BATCH_INVARIANT=1"


def test_adapters_on_one_gpu_are_served_but_in_vllms_own_layout() -> None:
    lora = {"target_modules": None, "enable_moe_shared_loras": False}
    assert refused(config_of(tensor_parallel_size=1, lora_config=Having(**lora))) == []
    for change, option in (
        ({"target_modules": ["q_proj"]}, "--lora-target-modules q_proj"),
        ({"enable_moe_shared_loras": True}, "--enable-moe-shared-loras"),
    ):
        assert refused(config_of(tensor_parallel_size=1, lora_config=Having(**lora | change))) == [option]


MXFP4, BF16 = (
    Having(max_position_embeddings=131072, intermediate_size=2880, quantization_config=section)
    for section in ({"quant_method": "mxfp4"}, None)
)


def test_ranks_that_cannot_cut_mxfp4_are_refused_with_a_remedy() -> None:
    """The model itself refused it only after every rank had started, in the offline engine's words."""
    (found,) = asked_for(limits.checks(config_of(hf_config=MXFP4, tensor_parallel_size=4)))
    assert found.asked == "--tensor-parallel-size 4"
    assert "--enable-expert-parallel" in found.remedy
    for fits in (
        {"hf_config": MXFP4, "tensor_parallel_size": 2},
        {"hf_config": BF16, "tensor_parallel_size": 4},
        {"hf_config": MXFP4, "tensor_parallel_size": 4, "data_parallel_size": 1, "enable_expert_parallel": True},
    ):
        assert refused(config_of(**fits)) == []


@pytest.mark.parametrize(("checkpoint", "wish"), [(MXFP4, "expanded"), (BF16, "packed")], ids=["mxfp4", "bf16"])
def test_an_unavailable_format_of_the_experts_is_refused(checkpoint, wish, monkeypatch) -> None:
    """Here the variable was silently ignored."""
    for word in ("auto", "packed" if wish == "expanded" else "expanded"):
        monkeypatch.setenv("NPU_GPTOSS_EXPERT_WEIGHTS", word)
        assert refused(config_of(hf_config=checkpoint)) == []
    monkeypatch.setenv("NPU_GPTOSS_EXPERT_WEIGHTS", wish)
    assert refused(config_of(hf_config=checkpoint)) == [f"NPU_GPTOSS_EXPERT_WEIGHTS={wish}"]
