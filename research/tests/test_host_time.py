"""The profile of a step: the dearest first, a step's share and not the run's; what fails costs the others nothing."""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from research import host_time
from research.host_time import ROUNDS, SWITCHES, WARM_UP_STEPS, Measured, Phases, device, functions, measure, union


def dear() -> None:
    time.sleep(0.002)


def cheap() -> str:
    return json.dumps([])


def test_functions_are_told_by_step_and_the_dearest_comes_first():
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10):
        dear()
        cheap()
        cheap()
    profile.disable()
    found = functions(profile, 10)
    assert "sleep" in found[0]["function"]
    assert found[0]["calls"] == 1
    assert 2000 <= found[0]["own_us"] < 20_000
    (dumps,) = [row for row in found if "dumps" in row["function"]]
    assert dumps["calls"] == 2


class Runner:
    def step(self) -> int:
        time.sleep(0.002)
        return self.inner() + self.apart(self.inner())

    @staticmethod
    def apart(value: int) -> int:
        return value

    def inner(self) -> int:
        time.sleep(0.001)
        return 1


class Derived(Runner):
    pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with what is timed and switched."""
    module = ModuleType("timed_here")
    module.Derived, module.Runner = Derived, Runner
    monkeypatch.setitem(sys.modules, "timed_here", module)
    monkeypatch.setattr(host_time, "_before", {})
    return module


def test_a_phase_within_another_is_not_in_it_and_all_is_put_back(here, monkeypatch):
    paths = {
        "graph": ("timed_here:Derived.step",),
        "WAIT for it": ("timed_here:Derived.inner",),
        "apart": ("timed_here:Runner.apart",),
        "gone": ("timed_here:Derived.gone", "timed_nowhere:f"),
    }
    monkeypatch.setattr(host_time, "PHASES", paths)
    before = dict(vars(Derived)), dict(vars(Runner))
    host_time.begin_phases(None)
    Derived().step()
    host_time.reset_phases(None)
    for _ in range(5):
        assert Derived().step() == 2
    told = host_time.end_phases(None, 999)
    assert (dict(vars(Derived)), dict(vars(Runner))) == before
    assert told["steps"] == 5
    assert told["absent"] == ["timed_here:Derived.gone", "timed_nowhere:f"]
    step, inner = told["phases"]["graph"], told["phases"]["WAIT for it"]
    assert (step["calls"], inner["calls"]) == (1, 2)
    assert 2000 <= step["own_us"] < 2000 + inner["own_us"]
    assert inner["own_us"] >= 2000
    assert told["busy_us"] == pytest.approx(step["own_us"] + told["phases"]["apart"]["own_us"], abs=0.2)


def test_a_phase_that_raises_is_told_and_leaves_no_trace():
    phases = Phases()

    def fails() -> None:
        raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        phases.timed("graph", fails)()
    phases.timed("graph", cheap)()
    assert phases.told(1)["phases"]["graph"]["calls"] == 1
    assert phases.told(1)["steps"] == 2


def test_what_is_switched_off_is_the_foreign_code_and_comes_back(here, monkeypatch):
    def repaired() -> str:
        return "repaired"

    repaired.__npu_gptoss_replaces__ = foreign = cheap
    here.place, here.other = repaired, dear
    monkeypatch.setattr(
        host_time, "SWITCHES", {"a": {"timed_here:place": None}, "b": {"timed_here:other": "json:dumps"}}
    )
    for off, expected in ((["a"], (foreign, dear)), ([], (repaired, dear)), (["a", "b"], (foreign, json.dumps))):
        assert host_time.switch(None, off) == []
        assert (here.place, here.other) == expected
    monkeypatch.setattr(host_time, "SWITCHES", {"c": {"timed_nowhere:place": None}})
    assert host_time.switch(None, ["c"]) == ["c"]


def test_every_switch_is_a_repair_or_a_method_that_overrides_vllm_s():
    pytest.importorskip("vllm.v1.worker.gpu.model_runner", reason="needs vLLM 0.33")
    from npu_gptoss.serving import compat

    compat.apply()
    repaired = {place for patch in compat.patches_here() for place in patch.touches}
    for name, places in SWITCHES.items():
        for path, without in places.items():
            owner, attribute = host_time.place(path)
            if without is None:
                assert path in repaired, name
                assert hasattr(vars(owner)[attribute], "__npu_gptoss_replaces__"), name
            else:
                assert vars(owner)[attribute] is not getattr(*host_time.place(without)), name


def test_every_phase_has_a_place_in_vllm():
    pytest.importorskip("vllm.v1.worker.gpu.model_runner", reason="needs vLLM 0.33")
    for phase, paths in host_time.PHASES.items():
        for path in paths:
            try:
                host_time.place(path)
            except AttributeError as error:
                pytest.fail(f"{phase}: {error}")


class Engine:
    """Answers `step` with the planned numbers of outputs; its clock goes on by a second at each."""

    def __init__(self, plan: list[int]) -> None:
        self.plan, self.now = list(plan), 0.0

    def add_request(self, *_: object) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return bool(self.plan)

    def step(self) -> list[Any]:
        self.now += 1.0
        return [object()] * self.plan.pop(0)


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.SamplingParams = lambda **_: None
    sampling = ModuleType("vllm.sampling_params")
    sampling.RequestOutputKind = SimpleNamespace(DELTA=1)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)


def test_steps_in_which_every_request_has_a_token_are_measured_and_no_others(params, monkeypatch):
    engine = Engine([0, 1, *[2] * 3, 1, *[2] * (WARM_UP_STEPS + 4), 1, 1])
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: engine.now)
    marks: list[float] = []
    times = host_time.decode(
        engine, 10, 2, 3, begin=lambda: marks.append(engine.now), end=lambda: marks.append(engine.now)
    )
    assert times == [1000.0] * 3
    assert marks[1] - marks[0] == 3
    with pytest.raises(RuntimeError, match="no 9 steady steps in a row at batch 2"):
        host_time.decode(Engine([2] * 10), 10, 2, 9)


def kernel(ts: float, dur: float, correlation: int, name: str = "k", cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def trace() -> list[dict[str, Any]]:
    """Three steps of 100 us: a graph of two kernels that overlap by 5 us, a pause of 10 us and a third; then a copy."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0}]
    for step in range(3):
        start, graph = 100.0 * step, 10 * step + 1
        events += [kernel(start + 1, 8, graph, "cudaGraphLaunch", "cuda_runtime")]
        events += [kernel(start + 10, 25, graph), kernel(start + 30, 20, graph), kernel(start + 60, 10, graph)]
        events += [kernel(start + 75, 5, graph + 1, "copy", "gpu_memcpy")]
    return events


def test_what_a_graph_takes_and_what_comes_between_two():
    found = device(trace())
    assert found["steps"] == 2
    assert found["medians"] == {
        "period_us": 100,
        "graph_us": 60,
        "graph_kernels": 3,
        "graph_kernels_sum_us": 55,
        "graph_idle_us": 10,
        "graph_overlaps": 1,
        "between_us": 40,
        "between_kernels": 1,
        "between_busy_us": 5,
        "during_others": 0,
    }
    assert found["between"] == [{"name": "copy", "calls": 1.0, "us": 5.0}]
    assert found["host_calls"] == [{"name": "cudaGraphLaunch", "calls": 1.0, "us": 8.0}]
    assert "error" in device([])
    assert "error" in device([event for event in trace() if event["ts"] < 100])
    assert union([kernel(0, 10, 1), kernel(2, 3, 1), kernel(20, 1, 1)]) == 11


class FakeChild:
    """Answers each part; `broken`: with an error for that part, "dead": not at all."""

    def __init__(self, name: str, broken: str = "") -> None:
        self.name, self.broken, self.asked = name, broken, []

    def hear(self, seconds: float) -> str:
        if self.broken == "dead":
            raise RuntimeError(f"{self.name}: no answer")
        return "ready"

    def ask(self, question: dict[str, Any], seconds: float) -> Any:
        self.asked.append(question)
        if question["part"] == self.broken:
            return {"error": "KeyError: 'x'"}
        return {"mean": 2.0, "median": 2.5, "absent": []} if question["part"] == "ms" else {"phases": {}}

    def end(self) -> None:
        pass


def measured(
    tmp_path: Path, first: str, second: str, without: list[str]
) -> tuple[dict[str, Any], dict[str, FakeChild]]:
    children = {"one process": FakeChild("one", first), "two processes": FakeChild("two", second)}
    args = argparse.Namespace(
        model=Path("m"), out=tmp_path / "out.json", batch=[1, 8], steps=5, without=without, engine={}
    )
    found = measure(args, lambda _, name, __: children[name])
    assert json.loads(args.out.read_text()) == found
    return found, children


def test_each_switch_is_measured_alone_and_without_stays_off(tmp_path):
    name, *others = SWITCHES
    found, children = measured(tmp_path, "", "", [name])
    one = found["one process"]
    assert set(one["ms, batch 1"]) == {"on", "off", *(f"only {other}" for other in others)}
    assert set(one["ms, batch 8"]) == {"on", "off"}
    assert one["ms, batch 1"]["on"] == {"ms": 2.0, "median_ms": 2.5, "means": [2.0] * ROUNDS, "absent": []}
    assert all(name in question["off"] for question in children["one process"].asked)
    assert {"phases, batch 1", "phases, batch 1, off", "device, batch 8", "functions, batch 1"} <= set(one)
    assert {question["part"] for question in children["two processes"].asked} == {"ms", "phases"}


@pytest.mark.parametrize("broken", ["ms", "phases", "device", "dead"])
def test_what_fails_costs_the_others_nothing(tmp_path, broken):
    found, _ = measured(tmp_path, broken, "", [])
    assert found["two processes"]["ms, batch 1"]["on"]["ms"] == 2.0
    if broken == "dead":
        assert found["one process"] == {"error": "one: no answer"}
    else:
        assert "error" in json.dumps(found["one process"])
        assert "functions, batch 8" in found["one process"]


def test_parts_of_an_engine_in_another_process_are_run_there(params, monkeypatch):
    sent: list[Any] = []

    class Llm:
        model_config = SimpleNamespace(get_vocab_size=lambda: 10)

        def __init__(self) -> None:
            self.llm_engine = Engine([1] * 100)
            self.llm_engine.collective_rpc = self.rpc

        def rpc(self, function: Any, args: tuple[Any, ...]) -> list[Any]:
            sent.append(function)
            assert getattr(importlib.import_module(function.__module__), function.__name__) is function
            return [function("worker", *args)]

    monkeypatch.setattr(host_time, "SWITCHES", {})
    here = __name__
    monkeypatch.setattr(
        host_time, "PHASES", {"front": (f"{here}:Engine.step",), "graph": (f"{here}:Engine.add_request",)}
    )
    told = Measured(Llm(), alone=False).phases(1, 5, [])
    assert list(told["front"]) == ["front"]
    assert told["front"]["front"]["calls"] == pytest.approx(100 / (5 + 2 * WARM_UP_STEPS), abs=0.01)
    assert sent == [host_time.switch, host_time.begin_phases, host_time.reset_phases, host_time.end_phases]
    sent.clear()
    assert not Measured(Llm(), alone=True).phases(1, 5, [])["front"]
    assert not sent
