"""Endurance runs find each broken promise, and ask no server of another machine; and a minute of them all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.errors import InputError
from tests.endure import judge
from tests.endure.__main__ import endure
from tests.endure.honest_requests import completion
from tests.endure.loop import Findings, Loop, refuse_other_machines
from tests.endure.scenarios import SCENARIOS
from tests.endure.server import Served, Stack

SOME = 4  # requests of each scenario: a minute of all


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "127.0.0.1:8000"])
def test_a_server_of_another_machine_is_never_asked(url: str) -> None:
    refuse_other_machines("http://[::1]:8000")
    with pytest.raises(InputError, match="loopback"):
        Loop(url, 1)


def points(minutes: float, slope: float, noise: float, base: float = 2000.0) -> judge.Points:
    """One look a second: a process that takes memory at first, restless by `noise`, and grows."""
    rng = random.Random(3)
    at = [second / 60 for second in range(int(minutes * 60))]
    return [(t, base + 200 * min(1.0, t / 3) + slope * t + rng.gauss(0, noise)) for t in at]


@pytest.mark.parametrize(
    ("minutes", "slope", "noise", "verdict"),
    [
        (20, 0.0, 8, "flat"),
        (20, 1.0, 8, "grows"),
        (150, 1.0, 8, "grows"),
        (20, -3.0, 8, "flat"),
        (20, 1.0, 200, "not judged"),
        (5, 1.0, 8, "not judged"),
    ],
)
def test_a_leak_of_1_mib_a_minute_is_caught(minutes: float, slope: float, noise: float, verdict: str) -> None:
    found = {"memory, core": points(minutes, slope, noise)}
    assert judge.verdict_of("memory, core", judge.slopes(found)["memory, core"]) == verdict
    due = {"flat": judge.KEPT, "grows": judge.BROKEN, "not judged": judge.NOT_JUDGED}[verdict]
    (_, *seen) = next(row for row in judge.verdicts(record(slopes=judge.slopes(found))) if row[0] == "no slope")
    assert seen[0] == due


def record(**fields: Any) -> judge.Record:
    """A record of a run that kept every promise, with other fields."""
    findings = Findings()
    for group, kind, outcome in (("honest", "chat", "equal"), ("hostile", "n", "answered"), ("rude", "leaves", "done")):
        findings.note(group, kind, outcome)
    whole = {
        **{"stack": "cpu-fcfs", "scenario": "mix", "seed": 1, "seconds": 1200.0, "requests": 3, "exit_status": None},
        "at_rest": {"kv_cache_usage_perc": 0.0, "num_requests_running": 0.0},
        "health": judge.health([0.01, 0.02]),
        "counts": judge.counted(findings),
        "slopes": {"memory, core": (0.1, 0.2)},
        "series": {"memory, core": [(0.0, 900.0), (1.0, 901.0)]},
        **{"leftovers": [], "backwards": []},
    }
    return judge.Record(**{**whole, **fields})


def broken(one: judge.Record) -> list[str]:
    return [promise for promise, verdict, _ in judge.verdicts(one) if verdict != judge.KEPT]


@pytest.mark.parametrize(
    ("fields", "promise"),
    [
        ({"exit_status": 0}, "no death"),
        ({"counts": [("honest", "chat", "different", 1)]}, "honest answers as alone"),
        ({"counts": [("alone", "chat", "wrong", 1), ("honest", "chat", "equal", 1)]}, "honest answers as alone"),
        ({"counts": [("honest", "chat", "told of the end", 1)]}, "honest answers as alone"),
        ({"counts": [("honest", "a", "equal", 1), ("hostile", "n", "status 500", 1)]}, "hostile ones answered as due"),
        ({"counts": [("honest", "a", "equal", 1), ("rude", "reads slowly", "stuck", 1)]}, "nobody stuck"),
        ({"counts": [("honest", "a", "equal", 1), ("operator", "SIGTERM", "exit status 1", 1)]}, "changes done"),
        ({"at_rest": {"kv_cache_usage_perc": 0.01}}, "at rest at the end"),
        ({"at_rest": {}}, "at rest at the end"),
        ({"leftovers": ["7 vllm"]}, "no process left"),
        ({"health": judge.health([0.1, float("inf")])}, "/health within 5 s"),
        ({"slopes": {}}, "no slope"),
    ],
)
def test_a_broken_promise_is_found(fields: dict[str, Any], promise: str, tmp_path: Path) -> None:
    judge.save(record(), tmp_path)
    (again,) = judge.load(tmp_path)
    assert (broken(again), judge.status(again)) == ([], 0)
    assert "| cpu, fcfs | mix | 1 | 20 | 3 | 1 of 1 | 1 of 1 | 1 | 0 |" in judge.table([again])
    assert broken(record(**fields)) == [promise]


def test_a_lost_token_is_found() -> None:
    loop, request = Loop("http://127.0.0.1:1", 1), completion("prompt", [7]).streamed
    told = [{"choices": [{"text": text, "finish_reason": None}]} for text in "ab"]
    told += [{"choices": [{"text": "c", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}]
    whole = loop.alone[request.key] = request.answer("data: [DONE]\n\n", told), None
    for answer in (whole[0], request.answer("data: [DONE]\n\n", told[1:])):
        loop._compare(request, answer, None)
    assert [outcome for _, _, outcome in loop.findings.counts] == ["equal", "different"]
    with pytest.raises(AssertionError, match="no end"):
        request.answer("", told)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("endure")
    write_tiny(folder / "model", trained=True)
    one = Served(Stack(), folder / "model", folder / "server.log").start()
    yield one
    assert one.stop() == []


def check(served: Served, name: str, **how: Any) -> None:
    seen = endure(served, name, minutes=1, **how)
    found = [row for row in judge.verdicts(seen, 10) if row[1] == judge.BROKEN or row[0].startswith("honest")]
    assert [verdict for _, verdict, _ in found] == [judge.KEPT], judge.printed(seen)


@pytest.mark.serving
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.does != "restarts"])
def test_some_requests_of_a_scenario_break_no_promise(served: Served, name: str) -> None:
    check(served, name, requests=SOME, in_flight=4, ahead=0, every=1)


@pytest.mark.serving
@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_minute_of_a_scenario_breaks_no_promise(served: Served, name: str) -> None:
    check(served, name)
