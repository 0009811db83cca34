"""Endurance runs find each fault that they look for, and ask no server of another machine; and a minute of them all."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_gptoss.errors import InputError
from tests.endure import judge
from tests.endure.__main__ import endure
from tests.endure.honest_requests import Said
from tests.endure.loop import PARTED, UNSERVED, WAKE_UP, Findings, Loop, refuse_other_machines
from tests.endure.scenarios import SCENARIOS
from tests.endure.server import Served, Stack, look

# requests of each scenario: a minute of all
SOME = dict.fromkeys(SCENARIOS, 6) | {"decode": 3}


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


@pytest.mark.parametrize(
    ("minutes", "at", "pool", "verdict"),
    [
        (20, (8, 11, 14), 8, "not judged"),  # a pool that is not full, or a leak
        (60, (2, 4, 6, 8, 10, 12, 14, 16), 8, "flat"),  # the pool filled before it is judged
        (20, (1, 3, 5, 7, 9, 11, 13, 15, 17), 8, "grows"),  # one more than the pool
        (20, (8, 11, 14), 1, "grows"),
        (20, (8, 11, 14), 0, "grows"),
    ],
)
def test_a_leak_of_threads_is_told_from_a_pool_that_fills(minutes, at, pool, verdict) -> None:
    """at: the minutes in which the engine's process gets one more thread."""
    seconds = [second / 60 for second in range(minutes * 60)]
    found = {"threads, core": [(minute, 50.0 + sum(minute >= one for one in at)) for minute in seconds]}
    one = record(series=found, slopes=judge.slopes(found), pools={"threads, core": pool} if pool else {})
    assert one.verdict("threads, core") == verdict
    assert judge.status(one) == {"flat": 0, "grows": 1, "not judged": 3}[verdict]


def test_students_quantile_is_that_of_tables() -> None:
    assert [judge.student(n) for n in (3, 8, 18, 1000)] == pytest.approx([3.182, 2.306, 2.101, 1.962], rel=1e-2)


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
    assert "| cpu | mix | 1 | 20 | 3 | 1 of 1 | 0 | 0 | 1 of 1 | 1 | 0 |" in judge.table([again])
    assert "polyline" in judge.picture(again)
    assert broken(record(**fields)) == [promise]


def test_memory_of_an_emulated_card_is_a_series_of_its_own() -> None:
    before = look(os.getpid(), "emulated")
    with mmap.mmap(-1, 64 << 20) as card:  # shared, as the card's
        card.write(bytes(64 << 20))
        whole, apart = look(os.getpid()), look(os.getpid(), "emulated")
    assert apart["memory, card"] == pytest.approx(before["memory, card"] + 64, abs=1)
    assert apart["memory, card"] + apart["memory, api"] == pytest.approx(whole["memory, api"], abs=8)
    assert "memory, card" not in whole


def test_the_longest_run_of_a_scenario_tells_what_grew() -> None:
    brief = record(scenario="tools", seconds=60.0, slopes={"memory, core": None})
    runs = [record(), record(scenario="tools", slopes={"memory, core": (1.0, 0.2), "threads, core": (0.0, 0.1)}), brief]
    lines = judge.table(runs).splitlines()
    assert lines[-1] == "| tools | 6 in 21 min, +1.00 ± 0.20; grows: memory, core |"
    assert lines[-2] == "| mix | 3 in 20 min, +0.10 ± 0.20 |"


class Exact:
    """Takes the engine's place: token 1 is as likely as 2, and 3 is not."""

    def batch_logits(self, prompts: list[list[int]], *, last: list[int]) -> list[torch.Tensor]:
        assert last == [1] * len(prompts)
        return [torch.tensor([[0.0, 5.0, 4.9, 0.0]]) for _ in prompts]


@pytest.mark.parametrize(
    ("now", "outcome"),
    [((2, 2), "near-tie"), ((3, 2), "different"), ((1,), "different")],
    ids=["a near-tie", "another token", "cut off"],
)
def test_another_answer_is_right_at_near_ties_only(now: tuple[int, ...], outcome: str) -> None:
    findings = Findings()
    for _ in range(2):
        findings.note("honest", "chat", PARTED)
        findings.parted["chat", Said((7,), (1, 2)), Said((7,), now), "words"] += 1
    assert broken(record(counts=judge.counted(findings))) == ["honest answers as alone"], "not judged yet: wrong"
    findings.judge(Exact())
    assert findings.counts == {("honest", "chat", outcome): 2}
    after = record(counts=judge.counted(findings), regrets=findings.regrets)
    assert broken(after) == ([] if outcome == "near-tie" else ["honest answers as alone"])


class Scripted(BaseHTTPRequestHandler):
    """A server of sums that has `fault` from its LATE-th request on."""

    LATE, fault, asked, asleep = 40, "", 0, False

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        left = Scripted.asked if Scripted.fault != "counter" else -Scripted.asked
        self.answer(f'vllm:requests_total{{a="b"}} {left}\nvllm:kv_cache_usage_perc 0.0\n'.encode())

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if not self.path.startswith("/v1/chat"):
            Scripted.asleep = self.path.startswith("/sleep") or (Scripted.asleep and self.path != "/wake_up")
            return self.answer(b"", 500 if self.path == Scripted.fault else 200)
        if Scripted.asleep:
            return self.answer(b"", 503)
        Scripted.asked += 1
        fault = Scripted.fault if Scripted.asked > self.LATE else ""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        a, b = map(int, re.findall(r"\d+", body["messages"][-1]["content"]))
        words = [f"{a}", " + ", f"{b}", " = ", f"{a + b}"]
        if fault == "stuck" and Scripted.asked == self.LATE + 1:
            time.sleep(3)
        time.sleep(0.01)
        usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 5}}
        if not body.get("stream"):
            choice = {"message": {"content": "".join(words)}, "finish_reason": "stop"}
            return self.answer(json.dumps({"choices": [choice], **usage}).encode())
        if fault == "token":
            del words[1]
        pieces: list[dict[str, Any]] = [{"choices": [{"delta": {"content": word}}]} for word in words]
        pieces += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], **usage}]
        return self.answer("".join(f"data: {json.dumps(p)}\n\n" for p in pieces).encode() + b"data: [DONE]\n\n")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    Scripted.asked, Scripted.fault, Scripted.asleep = 0, "", False
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 256)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None, wait=lambda seconds: None)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    yield SimpleNamespace(url=url, process=process, stack=Stack(), log=Path(os.devnull))
    server.shutdown()


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("", ""),
        ("token", "honest answers as alone"),
        ("stuck", "honest answers as alone"),
        ("counter", "counters never go back"),
    ],
)
def test_a_fault_of_a_scripted_server_is_caught(scripted: Any, fault: str, promise: str) -> None:
    Scripted.fault = fault
    seen = endure(scripted, "short", minutes=1, requests=300, ahead=40, patience=2, every=0.1)
    assert seen.number("honest") >= 300
    assert [name for name, verdict, _ in judge.verdicts(seen) if verdict == judge.BROKEN] == [promise] * bool(fault)


@pytest.mark.parametrize(
    ("sleeps", "fault", "told", "wrong"),
    [(True, "", True, False), (False, "", False, True), (True, WAKE_UP, True, False)],
)
def test_a_sleeping_server_is_taken_for_a_wrong_answer(scripted, sleeps, fault, told, wrong) -> None:
    Scripted.fault, loop = fault, Loop(scripted.url, 1)

    async def run() -> None:
        operator = asyncio.create_task(loop.change_again_and_again(sleeps, every=0.02))
        await loop.run(SCENARIOS["short"], 1.2, in_flight=2)
        operator.cancel()

    asyncio.run(run())
    seen = loop.findings
    assert (bool(seen.number("honest", UNSERVED)), bool(seen.number("honest", "wrong"))) == (told, wrong)
    assert seen.number("operator", "done")
    assert bool(seen.number("operator", "status 500")) is bool(fault)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("endure")
    write_tiny(folder / "model", trained=True)
    one = Served(Stack(), folder / "model", folder / "server.log").start()
    yield one
    assert one.stop() == []


SHORT = [pytest.param(name, True) for name, scenario in SCENARIOS.items() if scenario.does != "restarts"]
MINUTES = [pytest.param(name, False, marks=pytest.mark.long) for name in SCENARIOS]


@pytest.mark.serving
@pytest.mark.slow
@pytest.mark.parametrize(("name", "short"), [*SHORT, *MINUTES])
def test_a_scenario_breaks_no_promise(served: Served, name: str, short: bool) -> None:
    few = {"requests": SOME[name], "in_flight": 4, "ahead": 0, "every": 1} if short else {}
    seen = endure(served, name, minutes=1, **few)
    found = [row for row in judge.verdicts(seen, 10) if row[1] == judge.BROKEN or row[0].startswith("honest")]
    assert [verdict for _, verdict, _ in found] == [judge.KEPT], judge.printed(seen)
