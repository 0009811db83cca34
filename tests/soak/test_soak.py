"""The soak finds each fault that it looks for, and asks no server of another machine; and a minute of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.errors import InputError
from tests.soak import report
from tests.soak.honest import Said
from tests.soak.run import Findings, Soak, refuse_other_machines
from tests.soak.server import Sample, Stack, start

REQUESTS = 120
HEALTH_LIMIT = 10.0  # seconds; other tests have the same two cores


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "127.0.0.1:8000"])
def test_a_server_of_another_machine_is_never_asked(url: str) -> None:
    refuse_other_machines("http://[::1]:8000")
    with pytest.raises(InputError, match="loopback"):
        Soak(url, 1)


def record(**fields: Any) -> report.Record:
    """A record of a run that kept every promise, with other fields."""
    findings = Findings()
    for group, kind, outcome in (("honest", "chat", "equal"), ("hostile", "n", "answered"), ("rude", "leaves", "done")):
        findings.note(group, kind, outcome, 0.1)
    whole = {
        **{"stack": "cpu-fcfs", "seed": 1, "seconds": 1.0, "requests": 3, "exit_status": None},
        "at_rest": {"kv_cache_usage_perc": 0.0, "num_requests_running": 0.0},
        "health": report.health([0.01, 0.02]),
        "counts": report.counted(findings),
        "thirds": report.thirds([sample(n, 900) for n in range(30)]),
        **{"slowest": {}, "words": [], "in_flight": [], "begun": [], "log": []},
    }
    return report.Record(**{**whole, **fields})


def sample(done: int, rss: float, descriptors: int = 40) -> Sample:
    roles = ("api", "core", "others")
    return Sample(done, done, dict.fromkeys(roles, rss), dict.fromkeys(roles, descriptors), dict.fromkeys(roles, 10))


def broken(one: report.Record) -> list[str]:
    return [promise for promise, kept, _ in report.verdicts(one) if not kept]


@pytest.mark.parametrize(
    ("fields", "promise"),
    [
        ({"exit_status": 0}, "no death"),
        ({"counts": [("honest", "chat", "different", 1)]}, "honest answers as alone"),
        ({"counts": [("alone", "chat", "wrong", 1)]}, "honest answers as alone"),
        ({"counts": [("hostile", "n", "status 500", 1)]}, "hostile ones answered as due"),
        ({"counts": [("rude", "reads slowly", "stuck", 1)]}, "nobody stuck"),
        ({"at_rest": {"kv_cache_usage_perc": 0.01}}, "at rest at the end"),
        ({"at_rest": {}}, "at rest at the end"),
        ({"health": report.health([0.1, float("inf")])}, "/health within 1 s"),
        ({"thirds": report.thirds([sample(n, 900 + 5 * n) for n in range(60)])}, "memory, descriptors, threads flat"),
        ({"thirds": report.thirds([sample(n, 900, 40 + n) for n in range(60)])}, "memory, descriptors, threads flat"),
    ],
)
def test_a_broken_promise_is_found(fields: dict[str, Any], promise: str, tmp_path: Path) -> None:
    report.save(record(), tmp_path)
    (again,) = report.load(tmp_path)
    assert broken(again) == []
    assert "| cpu, fcfs | 1 | 3 | 1 of 1 | 1 of 1 | 1 | 0 | 0, 0 | 0.02 s | flat |" in report.table([again])
    assert broken(record(**fields)) == [promise]


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
        findings.note("honest", "chat", "parted", 0.1)
        findings.parted["chat", Said((7,), (1, 2)), Said((7,), now), "words"] += 1
    assert broken(record(counts=report.counted(findings))) == ["honest answers as alone"], "not judged yet: wrong"
    findings.judge(Exact())
    assert findings.counts == {("honest", "chat", outcome): 2}
    after = record(counts=report.counted(findings), regrets=findings.regrets)
    assert broken(after) == ([] if outcome == "near-tie" else ["honest answers as alone"])


@pytest.fixture(scope="module")
def minute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[report.Record]:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny
    from tests.soak.__main__ import soak

    folder = tmp_path_factory.mktemp("soak")
    write_tiny(folder / "model", trained=True)
    stack = Stack()
    with start(stack, folder / "model", folder / "server.log") as (server, process):
        yield soak(stack, folder / "model", server, process, requests=REQUESTS, seconds=120, seed=13, variants=2)


@pytest.mark.serving
@pytest.mark.slow
def test_a_minute_of_the_soak_keeps_its_promises(minute: report.Record) -> None:
    assert all(kept for _, kept, _ in report.verdicts(minute, HEALTH_LIMIT)), report.printed(minute, HEALTH_LIMIT)
    assert minute.number("honest") > REQUESTS / 2
    assert minute.number("hostile") > 10
    assert "chat" in {kind for _, kind, _, _ in minute.counts}
