"""The soak finds each fault that it looks for, and asks no server of another machine; and a minute of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.errors import InputError
from tests.soak import report
from tests.soak.honest import KINDS, Said, Wrong, read_response_stream
from tests.soak.run import Findings, Soak, ask, refuse_other_machines
from tests.soak.server import Sample, Stack, start

REQUESTS = 120
HEALTH_LIMIT = 10.0  # seconds; other tests have the same two cores


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "127.0.0.1:8000"])
def test_a_server_of_another_machine_is_never_asked(url: str) -> None:
    refuse_other_machines("http://[::1]:8000")
    with pytest.raises(InputError, match="loopback"):
        Soak(url, 1)


@asynccontextmanager
async def server(status: int, lines: list[str]) -> AsyncIterator[str]:
    """The address of an HTTP server on a free port that answers every request with these lines."""
    from aiohttp import web

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for line in lines:
            await response.write(line.encode() + b"\n\n")
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def delta(text: str, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


SUM = {"content": "3 + 4 = 7.", "reasoning": "", "calls": [], "finish": "stop"}
WHOLE = [delta("3 + 4 "), delta("= 7.", "stop"), "data: [DONE]"]


@pytest.mark.parametrize(
    ("status", "lines", "words"),
    [
        (200, WHOLE, None),
        (200, WHOLE[:-1], "without \\[DONE\\]"),
        (200, [WHOLE[0], WHOLE[2]], "one finish_reason"),
        (200, [WHOLE[0], 'data: {"error": {"message": "no"}}', *WHOLE[1:]], "error within"),
        (500, ["no"], "answered 500"),
        (200, ["data: [DONE]"], "empty stream"),
        (200, ["data: {", "data: [DONE]"], "another shape"),
    ],
    ids=["whole", "cut off", "no end", "an error within", "500", "empty", "no JSON"],
)
def test_a_stream_that_loses_something_is_found(status: int, lines: list[str], words: str | None) -> None:
    async def run() -> Any:
        soak = Soak("http://127.0.0.1:1", 1)
        async with server(status, lines) as url, soak.session() as session:
            return (await ask(session, url, KINDS[1][1](1), {}))[0]

    if words is None:
        assert asyncio.run(run()) == SUM
    else:
        with pytest.raises(Wrong, match=words):
            asyncio.run(run())


def test_a_response_with_other_deltas_than_its_object_is_found() -> None:
    part = {"type": "message", "content": [{"text": "3 + 4 = 7."}]}
    events = [
        {"type": "response.output_text.delta", "sequence_number": 0, "delta": "3 + 4 = 7."},
        {"type": "response.completed", "sequence_number": 1, "response": {"status": "completed", "output": [part]}},
    ]
    assert read_response_stream(events)["items"] == [["message", "3 + 4 = 7."]]
    for broken in ([{**events[0], "delta": "3"}, events[1]], events[:1], [events[0], {**events[1], **events[0]}]):
        with pytest.raises(Wrong):
            read_response_stream(broken)


@pytest.mark.parametrize(
    ("kind", "content", "outcome"),
    [
        ("chat", "3 + 4 = 7.", "equal"),
        ("chat", "3 + 4 = 8.", "different"),
        ("structured output", '"summer"', "wrong"),
    ],
)
def test_an_answer_other_than_alone_or_than_its_schema_is_found(kind: str, content: str, outcome: str) -> None:
    make = next(make for _, make in KINDS if make(1).kind == kind)
    message = {"message": {"content": content}, "finish_reason": "stop"}

    async def found() -> Findings:
        async with server(200, [json.dumps({"choices": [message]})]) as url:
            soak = Soak(url, 1)
            soak.alone[make(0).key] = SUM, None
            async with soak.session() as session:
                await soak.honest(session, make, 1)
        return soak.findings

    assert asyncio.run(found()).number("honest", outcome) == 1


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
    before = record(counts=report.counted(findings), parted=report.unjudged(findings))
    assert broken(before) == ["honest answers as alone"], "an answer that is not judged yet counts as wrong"
    after = report.judged(before, Exact())
    assert after.counts == [("honest", "chat", outcome, 2)]
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
