"""The soak finds what it looks for and asks nobody else's server; and a minute of it, against a server of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.errors import InputError
from tests.serving.server import Server
from tests.soak import report
from tests.soak.honest import (
    KINDS,
    Said,
    Wrong,
    read_chat_stream,
    read_response_stream,
    said,
)
from tests.soak.run import Findings, Soak, ask, refuse_other_machines
from tests.soak.server import Sample, Stack, start

REQUESTS = 120
HEALTH_LIMIT = 10.0  # seconds; other tests have the same two cores


# --- what it looks for ---


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://example.org", "http://192.168.1.2", "127.0.0.1:8000"])
def test_servers_of_others_are_never_asked(url: str) -> None:
    with pytest.raises(InputError, match="loopback"):
        Soak(url, 1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000", "http://127.9.9.9:1"])
def test_this_machine_may_be_asked(url: str) -> None:
    refuse_other_machines(url)


@asynccontextmanager
async def server_that_says(reply: Callable[[], Any]) -> AsyncIterator[str]:
    """An HTTP server on a free port; `reply` makes (status, body) or a stream's lines."""
    from aiohttp import web

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        status, lines = reply()
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for line in lines:
            await response.write(line.encode() + b"\n\n")
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def delta(text: str, finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


WHOLE = [delta("3 + 4 "), delta("= 7.", "stop"), "data: [DONE]"]


@pytest.mark.parametrize(
    ("status", "lines", "words"),
    [
        (200, WHOLE[:-1], "without \\[DONE\\]"),
        (200, [WHOLE[0], WHOLE[2]], "one finish_reason"),
        (200, [WHOLE[0], 'data: {"error": {"message": "no"}}', *WHOLE[1:]], "error within"),
        (500, ["no"], "answered 500"),
        (200, ["data: [DONE]"], "empty stream"),
        (200, ["data: {", "data: [DONE]"], "another shape"),
    ],
    ids=["cut off", "no end", "an error within", "500", "empty", "no JSON"],
)
def test_a_stream_that_loses_something_is_noticed(status: int, lines: list[str], words: str) -> None:
    async def run() -> None:
        soak = Soak("http://127.0.0.1:1", 1)
        async with server_that_says(lambda: (status, lines)) as url, soak.session() as session:
            await ask(session, url, KINDS[1][1](1), {})

    with pytest.raises(Wrong, match=words):
        asyncio.run(run())


def test_a_whole_stream_reads_as_the_whole_answer() -> None:
    pieces = [json.loads(line[6:]) for line in WHOLE[:-1]]
    assert read_chat_stream(pieces) == {"content": "3 + 4 = 7.", "reasoning": "", "calls": [], "finish": "stop"}


def test_a_response_s_deltas_have_to_add_up_to_the_final_object() -> None:
    part = {"type": "message", "content": [{"text": "3 + 4 = 7."}]}
    events = [
        {"type": "response.output_text.delta", "sequence_number": 0, "delta": "3 + 4 = 7."},
        {"type": "response.completed", "sequence_number": 1, "response": {"status": "completed", "output": [part]}},
    ]
    assert read_response_stream(events)["items"] == [["message", "3 + 4 = 7."]]
    with pytest.raises(Wrong, match="deltas"):
        read_response_stream([{**events[0], "delta": "3"}, events[1]])
    with pytest.raises(Wrong, match="last event"):
        read_response_stream(events[:1])
    with pytest.raises(Wrong, match="sequence"):
        read_response_stream([events[0], {**events[1], "sequence_number": 0}])


def test_streamed_kinds_follow_those_whose_answer_they_need() -> None:
    """Answers are taken in this order: a streamed one that came first would be compared with itself."""
    seen: set[str] = set()
    for _, make in KINDS:
        request = make(1)
        assert request.key in seen or not request.streamed, request.kind
        seen.add(request.key)


def record(**fields: Any) -> report.Record:
    findings = Findings()
    for group, kind, outcome in (("honest", "chat", "equal"), ("hostile", "n", "answered"), ("rude", "leaves", "done")):
        findings.note(group, kind, outcome, 0.1)
    whole = {
        "stack": "cpu-fcfs",
        "seed": 1,
        "seconds": 1.0,
        "requests": 3,
        "exit_status": None,
        "at_rest": {"kv_cache_usage_perc": 0.0, "num_requests_running": 0.0},
        "health": report.health([0.01, 0.02]),
        "slowest": {},
        "counts": report.counted(findings),
        "thirds": report.thirds([sample(n, 900) for n in range(30)]),
        "words": [],
        "in_flight": [],
        "begun": [],
        "log": [],
    }
    return report.Record(**{**whole, **fields})


def sample(done: int, rss: float, descriptors: int = 40) -> Sample:
    roles = ("api", "core", "others")
    return Sample(done, done, dict.fromkeys(roles, rss), dict.fromkeys(roles, descriptors), dict.fromkeys(roles, 10))


def broken(one: report.Record) -> list[str]:
    return [what for what, kept, _ in report.verdicts(one) if not kept]


def test_a_good_run_keeps_every_promise() -> None:
    assert broken(record()) == []
    assert "| cpu, fcfs | 1 | 3 | 1 of 1 | 1 of 1 | 1 | 0 | 0, 0 | 0.02 s | flat |" in report.table([record()])


class Exact:
    """In the place of the engine: token 1 is as likely as 2, and 3 is not."""

    def batch_logits(self, prompts: list[list[int]], *, last: list[int]) -> list[torch.Tensor]:
        assert last == [1] * len(prompts)
        return [torch.tensor([[0.0, 5.0, 4.9, 0.0]]) for _ in prompts]


@pytest.mark.parametrize(
    ("alone", "now", "outcome"),
    [
        ((1, 2), (2, 2), "near-tie"),
        ((1, 2), (3, 2), "different"),
        ((1, 2), (1,), "different"),
    ],
    ids=["a near-tie", "another token", "cut off"],
)
def test_an_answer_that_parts_is_fine_at_near_ties_only(alone, now, outcome, tmp_path) -> None:
    findings = Findings()
    for _ in range(2):
        findings.note("honest", "chat", "parted", 0.1)
        findings.parted["chat", Said((7,), alone), Said((7,), now), "words"] += 1
    before = record(counts=report.counted(findings), parted=report.unjudged(findings))
    assert broken(before) == ["honest answers as alone"], "what is not judged yet is not fine"
    report.save(before, tmp_path)
    (again,) = report.load(tmp_path)
    after = report.judged(again, Exact())
    assert after.counts == [("honest", "chat", outcome, 2)]
    assert bool(after.words) == (outcome == "different")
    assert broken(after) == ([] if outcome == "near-tie" else ["honest answers as alone"])
    assert report.judged(after, Exact()) == after


def test_the_tokens_of_a_stream_are_those_of_the_whole_reply() -> None:
    whole = {"prompt_token_ids": [7, 8], "choices": [{"index": 0, "token_ids": [1, 2, 3]}]}
    first = {"prompt_token_ids": [7, 8], "choices": [{"index": 0, "delta": {}}]}
    pieces = [first, *({"choices": [{"index": 0, "token_ids": ids}]} for ids in ([1], None, [2, 3]))]
    assert said([whole]) == said(pieces) == Said((7, 8), (1, 2, 3))
    assert said([{"type": "response.created"}]) is None


def test_memory_of_the_gpu_that_grows_is_told() -> None:
    growing = [replace(sample(n, 900), gpu={"all": 9000.0 + 20 * n}) for n in range(60)]
    assert broken(record(thirds=report.thirds(growing))) == ["memory, descriptors, threads flat"]


@pytest.mark.parametrize(
    ("kind", "content", "outcome"),
    [
        ("chat", "3 + 4 = 7.", "equal"),
        ("chat", "3 + 4 = 8.", "different"),
        ("structured output", "", "wrong"),  # as a call that nobody asked for leaves it
        ("structured output", '"summer"', "wrong"),
    ],
)
def test_an_answer_is_held_to_what_was_said_alone_and_to_its_schema(kind: str, content: str, outcome: str) -> None:
    make = next(make for _, make in KINDS if make(1).kind == kind)
    message = {"message": {"content": content}, "finish_reason": "stop"}

    async def told() -> Findings:
        async with server_that_says(lambda: (200, [json.dumps({"choices": [message]})])) as url:
            soak = Soak(url, 1)
            soak.alone[make(0).key] = {"content": "3 + 4 = 7.", "reasoning": "", "calls": [], "finish": "stop"}, None
            async with soak.session() as session:
                await soak.honest(session, make, 1)
        return soak.findings

    assert asyncio.run(told()).number("honest", outcome) == 1


LEAK = [sample(n, 900 + 5 * n) for n in range(60)]
OPEN = [sample(n, 900, descriptors=40 + n) for n in range(60)]


@pytest.mark.parametrize(
    ("fields", "promise"),
    [
        ({"exit_status": 0}, "no death"),
        ({"counts": [("honest", "chat", "different", 1)]}, "honest answers as alone"),
        ({"counts": [("honest", "chat", "wrong", 1)]}, "honest answers as alone"),
        ({"counts": [("alone", "chat", "wrong", 1)]}, "honest answers as alone"),
        ({"counts": [("hostile", "n", "status 500", 1)]}, "hostile ones answered as due"),
        ({"counts": [("hostile", "n", "no answer", 1)]}, "hostile ones answered as due"),
        ({"counts": [("rude", "reads slowly", "stuck", 1)]}, "nobody stuck"),
        ({"at_rest": {"kv_cache_usage_perc": 0.01}}, "at rest at the end"),
        ({"at_rest": {}}, "at rest at the end"),
        ({"health": report.health([0.1, 1.5])}, "/health within 1 s"),
        ({"health": report.health([0.1, float("inf")])}, "/health within 1 s"),
        ({"thirds": report.thirds(LEAK)}, "memory, descriptors, threads flat"),
        ({"thirds": report.thirds(OPEN)}, "memory, descriptors, threads flat"),
    ],
)
def test_each_broken_promise_is_told(fields: dict[str, Any], promise: str) -> None:
    assert broken(record(**fields)) == [promise]


def test_a_server_that_answers_nobody_costs_no_record() -> None:
    from tests.soak.__main__ import at_rest

    assert at_rest(Server("http://127.0.0.1:1", "gone", Path("none"))) == {}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    report.save(record(), tmp_path)
    (again,) = report.load(tmp_path)
    assert broken(again) == []
    assert report.table([again]) == report.table([record()])


# --- a minute of it ---


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
