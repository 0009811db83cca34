"""A worker of vllm-ascend that wakes up, and a pause of vLLM 0.33; the rest is in test_failed_requests_engine.py."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from npu_gptoss.serving.compat.server import completions, sleep
from npu_gptoss.serving.compat.server.shutdown import is_final


class CaMemAllocator:
    """Fresh memory in every tensor of the cache."""

    @staticmethod
    def get_instance() -> Any:
        return SimpleNamespace(wake_up=lambda tags: [cache.fill_(float("nan")) for cache in CACHES])


CACHES = [torch.zeros(3, 2) for _ in range(3)]


class NPUWorker:
    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(kv_caches=[(CACHES[0], CACHES[1]), CACHES[2]])

    def wake_up(self, tags: list[str] | None = None) -> None:
        allocator = CaMemAllocator.get_instance()
        allocator.wake_up(tags=tags)


@pytest.mark.parametrize(("tags", "zero"), [(None, True), (["kv_cache"], True), (["weights"], False)])
def test_a_woken_cache_holds_what_memory_held(monkeypatch, tags, zero):
    module = ModuleType("worker")
    module.NPUWorker = type("NPUWorker", (NPUWorker,), {"wake_up": NPUWorker.wake_up})
    sleep.install_cache(module)
    module.NPUWorker().wake_up(tags)
    assert all(bool((cache == 0).all()) is zero for cache in CACHES)


class EngineCore:
    """An engine that is half awake."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.model_executor = SimpleNamespace(is_sleeping=True, wake_up=lambda tags: None)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_executor.wake_up(tags)
        self.resume_scheduler()

    def resume_scheduler(self) -> None:
        self.did.append("resumes")


class DPEngineCoreProc(EngineCore):
    def resume_scheduler(self) -> None:
        super().resume_scheduler()
        self.did.append("listens to waves")


@pytest.mark.parametrize("kind", [EngineCore, DPEngineCoreProc])
def test_half_a_wake_up_lets_the_engine_go_on(kind, monkeypatch):
    """If a wave began before the other half, a data parallel engine stayed paused: requests waited for ever."""
    module = ModuleType("core")
    module.EngineCore, module.DPEngineCoreProc = EngineCore, DPEngineCoreProc
    for core in (EngineCore, DPEngineCoreProc):
        monkeypatch.setattr(core, "resume_scheduler", core.resume_scheduler)
    sleep.install_wake_up(module)
    engine = kind()
    engine.wake_up(["weights"])
    assert engine.did == []
    engine.model_executor.is_sleeping = False
    engine.wake_up(["kv_cache"])
    assert engine.did == ["resumes", "listens to waves"][: 1 + (kind is DPEngineCoreProc)]


@pytest.mark.parametrize(
    ("variable", "option", "wakes"),
    [(None, None, False), ("1", None, False), ("0", None, True), (None, 0, True), ("0", 1, False)],
)
def test_a_server_sleeps_from_which_vllm_ascend_cannot_wake_it(monkeypatch, variable, option, wakes):
    """Its /wake_up raises if weights may be in FRACTAL_NZ, after /sleep has taken them away."""
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    if variable:
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", variable)
    config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=True),
        additional_config=None if option is None else {"weight_nz_mode": option},
    )
    said = sleep.objection(config, 1, pauses=True)
    assert (said == "") is wakes
    assert "VLLM_ASCEND_ENABLE_NZ=0" in said or wakes
    assert sleep.objection(config, 0, pauses=True) == ""
    assert "level" in sleep.objection(config, 2, pauses=True) or not wakes


def test_a_completion_that_a_pause_cut_is_taken_for_a_whole_one():
    module = ModuleType("serving")
    module.GenerateBaseServing = type(
        "GenerateBaseServing", (), {"_raise_if_error": lambda self, finish_reason, request_id: None}
    )
    completions.install_pauses(module)
    serving = module.GenerateBaseServing()
    serving._raise_if_error("stop", "a")
    with pytest.raises(Exception, match="paused") as caught:
        serving._raise_if_error("abort", "a")
    assert is_final(caught.value)
