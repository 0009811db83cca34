"""A server on Ascend decides about its experts before it loads; the card and the other ranks are made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from npu_gptoss.kernels import platform_override
from npu_gptoss.model import device_memory
from npu_gptoss.model.config import GptOssConfig, published_config
from npu_gptoss.model.device_memory import GIB, Part, choose, hccl_bytes
from npu_gptoss.nominal import MEMORY
from npu_gptoss.serving import expert_weights
from npu_gptoss.serving.ascend import limits
from npu_gptoss.serving.releases import ASCEND_RELEASES, vllm_0_11
from tests.refused import refused

pytestmark = pytest.mark.serving

LARGE = replace(published_config(36, experts=128), quantization="mxfp4")
SMALL = replace(published_config(), quantization="mxfp4")
Decide = Callable[..., bool]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Decide:
    """`kept_packed` on a card of `total` bytes with Triton-Ascend. share: as vLLM cuts the experts, else by width."""

    def run(
        config: GptOssConfig,
        *,
        ranks: int = 1,
        replicas: int = 1,
        stage: int = 0,
        stages: int = 1,
        share: tuple[int, tuple[int, int]] | None = None,
        total: int,
        device: str = "npu",
        **options: Any,
    ) -> bool:
        place = Having(
            world_size=stages, rank_in_group=stage, is_first_rank=stage == 0, is_last_rank=stage == stages - 1
        )
        for name, value in {
            "current_platform": Having(device_type=device),
            "get_pp_group": lambda: place,
            "get_dp_group": lambda: Having(world_size=replicas),
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: ranks,
            "expert_share": lambda _: share or (ranks, (0, config.num_local_experts)),
        }.items():
            monkeypatch.setattr(expert_weights, name, value)
        monkeypatch.setattr(torch, "npu", Having(mem_get_info=lambda: (total, total)), raising=False)
        length, original = options.pop("max_model_len", 16384), options.pop("original_max_model_len", None)
        model = Having(dtype=torch.bfloat16, max_model_len=length, original_max_model_len=original)
        cache = Having(**{"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None, **options})
        features = {"npu": ("ascend", frozenset({"torch_npu", "triton_ascend"})), "cpu": ("cpu", frozenset())}
        with platform_override(*features[device]):
            return expert_weights.kept_packed(Having(model_config=model, cache_config=cache), config)

    return run


def test_experts_are_packed_where_bf16_does_not_fit(decide: Decide) -> None:
    card = MEMORY["910B3"]
    assert [decide(LARGE, ranks=ranks, total=card) for ranks in (2, 4, 8)] == [True, True, False]
    assert not decide(SMALL, total=card)
    with refused("--gpu-memory-utilization"):
        decide(LARGE, total=card)


def test_memory_is_counted_for_this_rank(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, card = [], MEMORY["910B3"]
    monkeypatch.setattr(
        device_memory, "choose", lambda *those, **options: asked.append((those, options)) or choose(*those, **options)
    )
    middle = {"ranks": 2, "replicas": 4, "stage": 1, "stages": 3, "share": (1, (16, 32))}
    decide(LARGE, **middle, total=card, gpu_memory_utilization=0.8)
    ((those, options),) = asked
    assert those == (LARGE, Part(ranks=2, parts=1, experts=16, layers=12, ends=0), 16384, card, 0.8)
    assert options["hccl"] == hccl_bytes(8)


@pytest.mark.parametrize(("parts", "ranks", "share"), [(1, 4, (1, (16, 24))), (4, 1, (4, (0, 32)))])
def test_the_experts_of_a_rank_begin_behind_the_others(monkeypatch, parts: int, ranks: int, share: Any) -> None:
    """By vLLM's own map; its third of four ranks, or all ranks with a part of each expert."""
    cut = Having(tp_size=parts, ep_size=ranks, ep_rank=2 % ranks)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 4)
    monkeypatch.setattr("vllm.distributed.get_dp_group", lambda: Having(world_size=1))
    monkeypatch.setattr(FusedMoEParallelConfig, "make", lambda **_: cut)
    config = Having(parallel_config=None, model_config=Having(hf_config=Having(num_local_experts=32)))
    assert vllm_0_11.expert_share(config) == share


def test_a_stage_is_reckoned_with_the_layers_that_it_gets(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PP_LAYER_PARTITION: of 35 layers BF16 does not fit on four cards, of half of 36 it does."""
    card = MEMORY["910B3"]
    stages = [{"ranks": 4, "stage": stage, "stages": 2, "total": card} for stage in (0, 1)]
    assert [decide(LARGE, **each) for each in stages] == [False, False]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "35,1")
    assert [decide(LARGE, **each) for each in stages] == [True, False]


def test_a_load_that_vllm_would_serve_otherwise_is_not_ended(decide: Decide) -> None:
    """From 0.23 on `--max-model-len auto` takes a length that fits; `--kv-cache-memory-bytes` beats utilisation."""
    card, long = 17 * GIB, {"max_model_len": 131072}
    with refused("--gpu-memory-utilization"):
        decide(SMALL, total=card, **long)
    assert decide(SMALL, total=card, original_max_model_len=-1, **long)
    with refused("--gpu-memory-utilization"):
        decide(SMALL, total=2 * card, gpu_memory_utilization=0.3)
    assert decide(SMALL, total=2 * card, gpu_memory_utilization=0.3, kv_cache_memory_bytes=GIB)


def test_a_bf16_checkpoint_that_does_not_fit_has_no_packed_remedy(decide: Decide) -> None:
    """Which would be refused, too."""
    with refused("--gpu-memory-utilization") as told:
        decide(replace(LARGE, quantization=None), total=MEMORY["910B3"])
    assert "EXPERT_WEIGHTS=expanded loads without this check" in str(told.value)
    assert "or packed" not in str(told.value)


def test_a_format_that_packed_experts_do_not_have_is_warned_of(decide, monkeypatch, caplog) -> None:
    monkeypatch.setenv("NPU_GPTOSS_EXPERT_FORMAT", "nz")
    with caplog.at_level(logging.WARNING, "vllm.npu_gptoss"):
        assert not decide(SMALL, total=MEMORY["910B3"])
        assert not caplog.records
        assert decide(LARGE, ranks=4, total=MEMORY["910B3"])
    (record,) = caplog.records
    assert "NPU_GPTOSS_EXPERT_FORMAT=nz" in record.getMessage()


def test_sizes_that_the_expansion_refuses_are_kept_in_bf16(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plain operators it would wait for the device in every step, which ends the capture of a graph."""
    wide, card = replace(LARGE, hidden_size=3008), MEMORY["910B3"]  # 4 rows of 3008, 12032 values
    assert not decide(wide, ranks=8, total=card)
    with refused("--gpu-memory-utilization"):
        decide(wide, ranks=4, total=card)
    monkeypatch.setenv("NPU_GPTOSS_EXPERT_WEIGHTS", "packed")
    for ranks in (1, 2, 4, 8):
        assert decide(LARGE, ranks=ranks, total=card), "gpt-oss's own sizes on so many ranks"
    with refused("NPU_GPTOSS_EXPERT_WEIGHTS"):
        decide(wide, ranks=8, total=card)


def test_a_cpu_refuses_the_wish_for_packed_experts(decide: Decide, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept until the load had ended, and lay there in four times the memory without a word."""
    assert not decide(SMALL, total=0, device="cpu")
    monkeypatch.setenv("NPU_GPTOSS_EXPERT_WEIGHTS", "packed")
    with refused("NPU_GPTOSS_EXPERT_WEIGHTS"):
        decide(SMALL, total=0, device="cpu")


@pytest.mark.parametrize(("release", "warned"), [("3.2.0", True), ("3.2.0rc4", False), (None, False)])
def test_a_triton_of_another_cann_is_a_warning(release, warned, decide: Decide, monkeypatch) -> None:
    """3.2.0 passes an option that the compiler of CANN 8.3 does not know."""
    said: list[str] = []
    monkeypatch.setattr(limits.releases, "installed", lambda *names: release)
    monkeypatch.setattr(limits.releases, "ascend_release", lambda: ASCEND_RELEASES[0])
    monkeypatch.setattr(expert_weights.logger, "warning", lambda form, *given: said.append(form % given))
    assert decide(LARGE, ranks=2, total=MEMORY["910B3"])
    assert ["triton-ascend 3.2.0: " in text and "==3.2.0rc4`" in text for text in said] == [True] * warned
