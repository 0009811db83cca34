"""Every number of `bench serve` against a server whose delays are known exactly, and everything that can go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
import aiohttp

from npu_gptoss.bench import client, latency, load, records
from npu_gptoss.bench.actions import serve as action
from npu_gptoss.bench.client import CHAT, COMPLETIONS, Answer
from npu_gptoss.cli import main
from npu_gptoss.errors import InputError
from tests.bench.scripted_server import (
    DONE,
    Event,
    Hangup,
    Later,
    Server,
    Silence,
    Status,
    Step,
    Wait,
    answer,
    delta,
    run,
    text,
    usage,
)


def asked(*scripts: Sequence[Step], api: str = COMPLETIONS, timeout: float = 5) -> list[Answer]:
    """The answers to one request after the other, one for each script."""

    async def use(server: Server) -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
            return [await client.ask(session, server.url, api, {}, server.clock) for _ in scripts]

    return run(Server(scripts), use)


def seconds(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


# -- what each time is


def test_each_time_is_what_its_definition_says():
    (got,) = asked([Wait(0.5), *answer(0.25, [0.125, 0.0625, 0.25])])
    assert got.error is None
    assert latency.ttft(got) == seconds(0.75)
    assert latency.gaps(got) == [seconds(0.125), seconds(0.0625), seconds(0.25)]
    assert latency.e2e(got) == seconds(0.75 + 0.4375)
    assert latency.tpot(got) == seconds(0.4375 / 3), "three tokens come after the first"
    assert (got.prompt_tokens, got.output_tokens) == (7, 4)


def test_tokens_are_the_servers_count_and_not_events():
    (got,) = asked(answer(0.5, [0.25, 0.25], tokens=9))
    assert got.output_tokens == 9
    assert latency.tpot(got) == seconds(0.5 / 8)
    assert len(latency.gaps(got)) == 2


def test_a_usage_that_comes_with_each_event_counts_at_the_end():
    def event(piece: str, so_far: int, finish: str | None = None) -> Event:
        return Event({**text(piece, finish).content, "usage": {"prompt_tokens": 7, "completion_tokens": so_far}})

    (got,) = asked([event("a", 1), event("b", 3), event("c", 5, "length"), DONE])
    assert got.output_tokens == 5


def test_an_event_without_output_is_not_the_first_token():
    script = [Wait(0.25), delta(role="assistant", content=""), Wait(0.5), delta(reasoning_content="Hm"), Wait(1.0)]
    (got,) = asked([*script, delta(content="7"), Wait(0.125), delta("stop"), usage(3), DONE], api=CHAT)
    assert latency.ttft(got) == seconds(0.75)
    assert latency.gaps(got) == [seconds(1.0)]
    assert latency.e2e(got) == seconds(1.875), "to the finish reason, which came without text"


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_whatever_the_model_writes_is_output(name):
    (got,) = asked([Wait(0.5), delta(**{name: "x"}), Wait(0.5), delta("stop"), usage(2), DONE], api=CHAT)
    assert latency.ttft(got) == seconds(0.5)


def test_a_completions_event_with_empty_text_waits_for_the_next():
    (got,) = asked([Wait(0.5), text(""), Wait(0.25), text("é", "length"), usage(2), DONE])
    assert latency.ttft(got) == seconds(0.75)


def test_the_time_that_usage_takes_is_in_no_number():
    (got,) = asked([Wait(0.5), text("a"), Wait(0.5), text("b", "length"), Wait(5.0), usage(2), Wait(5.0), DONE])
    assert latency.e2e(got) == seconds(1.0)


def test_a_single_token_has_no_time_per_token():
    (got,) = asked(answer(0.5, []))
    assert latency.tpot(got) is None
    record = latency.summary([got], 1)
    assert record["ttft_mean_ms"] == record["e2e_mean_ms"] == 500
    assert record["tpot_mean_ms"] is None
    assert record["itl_p99_ms"] is None


def test_events_that_come_in_pieces_and_with_comments_are_read_whole():
    half = json.dumps({"choices": [{"text": "ä", "finish_reason": "stop"}]})
    script = [Event(": ping\n\n", seen=False), Event(f"data: {half[:20]}", seen=False), Wait(0.5)]
    (got,) = asked([*script, Event(f"{half[20:]}\n\n"), usage(1), DONE])
    assert latency.ttft(got) == seconds(0.5)


def test_the_next_request_does_not_pay_for_another_connection():
    """The body ends behind [DONE]; left unread, its connection is closed, and the next TTFT has a handshake in it."""

    async def use(server: Server) -> list[Answer]:
        async with aiohttp.ClientSession() as session:
            return [await client.ask(session, server.url, COMPLETIONS, {}, server.clock) for _ in range(3)]

    server = Server([[*answer(0.5, [0.25]), Later]])
    assert [got.error for got in run(server, use)] == [None] * 3
    assert len(server.connections) == 1


def test_a_body_that_does_not_end_is_no_failure_of_an_answer_that_did(monkeypatch):
    monkeypatch.setattr(client, "BODY_END_S", 0.05)
    first, second = asked([*answer(0.5, [0.25]), Silence], answer(0.5, [0.25]))
    assert first.error is None
    assert second.error is None


# -- what counts for nothing, and why

FINISHED = [text("a", "length"), usage(1), DONE]
FAILURES = {
    "a refusal": ([Status(400, {"error": {"message": "prompt is\ntoo long"}})], "HTTP 400: prompt is too long"),
    "a crash": ([Status(500, "Internal Server Error")], "HTTP 500: Internal Server Error"),
    "an older error": ([Status(404, {"object": "error", "message": "no such model"})], "HTTP 404: no such model"),
    "a hangup at once": ([Hangup], "the connection broke before the first token"),
    "a hangup inside": ([text("a"), Hangup], "the connection broke in the middle of the answer"),
    "an error inside": (
        [text("a"), Event({"error": {"message": "engine died", "code": 500}})],
        "the server ended the stream: engine died",
    ),
    "an early end": ([text("a"), text("b"), DONE], "the stream ended before a finish_reason"),
    "no usage": ([text("a", "length"), DONE], "the stream has no usage"),
    "no output": ([text("", "length"), usage(1), DONE], "no event of the stream carried output"),
    "no tokens": ([text("a", "length"), usage(0), DONE], "no event of the stream carried output"),
    "no JSON": ([Event("data: {oops\n\n", seen=False), DONE], "an event of the stream is no JSON"),
    "no object": ([Event("data: 7\n\n"), DONE], "an event of the stream is no object: 7"),
    "no choices": ([Event({"choices": 7}), DONE], "the choices of an event are no objects: 7"),
    "no choice": ([Event({"choices": ["a"]}), DONE], "the choices of an event are no objects: ['a']"),
    "half a usage": (
        [text("a", "length"), Event({"usage": {"prompt_tokens": "7", "completion_tokens": 1}}), DONE],
        "the stream has no usage",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_goes_wrong_is_a_failure_with_its_reason(name):
    script, reason = FAILURES[name]
    bad, good = asked(script, FINISHED)
    assert bad.error.startswith(reason)
    assert good.error is None, "the next request is not touched by it"


def test_a_delta_that_is_no_object_is_a_failure_too():
    (got,) = asked([Event({"choices": [{"delta": "a"}]}), DONE], api=CHAT)
    assert got.error == "the delta of an event is no object: 'a'"


def test_a_server_that_falls_silent_is_given_up():
    (got,) = asked([text("a"), Silence], timeout=0.2)
    assert got.error == "no end within 0.2 s"


def test_no_server_is_a_failure_of_the_request_too():
    async def use(server: Server) -> Answer:
        async with aiohttp.ClientSession() as session:
            return await client.ask(session, "http://127.0.0.1:9/v1", COMPLETIONS, {}, server.clock)

    assert run(Server([[]]), use).error.startswith("no connection (")


def test_a_reason_is_one_line_of_a_sentences_length():
    assert client.message_of({"error": "x " * 500}) == ("x " * 100)[:199] + "…"


# -- what is said of many


def made(ttft: float, gap: float, tokens: int, sent: float = 0.0) -> Answer:
    outputs = tuple(sent + ttft + gap * number for number in range(tokens))
    return Answer(sent, outputs[-1], outputs, 10, tokens)


def test_percentiles_interpolate_between_the_nearest_two():
    answers = [made(value / 1e3, 0.001, 2) for value in (40, 10, 30, 20, 50)]
    record = latency.summary(answers, 2)
    assert record["ttft_p50_ms"] == 30
    assert record["ttft_p90_ms"] == 46  # place 3.6 of 0 to 4
    assert record["ttft_p99_ms"] == 49.6
    assert record["ttft_mean_ms"] == 30
    assert record["ttft_std_ms"] == pytest.approx(15.811, abs=1e-3), "of the sample, n - 1"


def test_rates_are_of_the_whole_run_and_of_what_succeeded():
    good = [made(1.0, 0.5, 3, sent=0.0), made(1.0, 0.5, 5, sent=1.0)]
    broken = Answer(2.0, 10.0, outputs=(3.0, 9.0), error="HTTP 500: no")
    record = latency.summary([*good, broken], 5)
    assert record["duration_s"] == 10.0, "from the first sending to the end of the last, failed ones included"
    assert record["output_tokens_per_s"] == 0.8
    assert record["requests_per_s"] == 0.2
    assert (record["requests"], record["succeeded"], record["failed"]) == (3, 2, 1)
    assert record["failures"] == {"HTTP 500: no": 1}
    assert record["short_answers"] == 1
    assert record["e2e_mean_ms"] == 2500, "a failed request is in no time"
    assert record["itl_mean_ms"] == 500, "nor are its gaps"


def test_gaps_of_all_requests_count_alike_and_tpot_once_a_request():
    record = latency.summary([made(1.0, 0.1, 11), made(1.0, 0.4, 2)], 2)
    assert record["itl_mean_ms"] == pytest.approx(1e3 * 1.4 / 11, rel=1e-4)
    assert record["tpot_mean_ms"] == pytest.approx(250)


def test_nothing_that_succeeded_is_no_record():
    with pytest.raises(latency.NothingSucceeded, match=r"none of 3 requests succeeded: 2 × b; 1 × a"):
        latency.summary([Answer(0, 1, error="b"), Answer(0, 1, error="a"), Answer(0, 1, error="b")], 4)


# -- each definition, mistaken: some test of the times must fail


def numbers(script: Sequence[Step], api: str) -> tuple[float, ...]:
    (got,) = asked(script, api=api)
    return (latency.ttft(got), latency.e2e(got), latency.tpot(got), *latency.gaps(got))


CHAT_SCRIPT = [Wait(0.25), delta(role="assistant", content=""), Wait(0.5), delta(reasoning="Hm"), Wait(1.0)]
CHAT_SCRIPT += [delta(content="7"), Wait(0.125), delta("stop"), usage(3), DONE]


def test_mistaken_definitions_give_other_numbers(monkeypatch):
    """The numbers of one chat, by hand; and by definitions that are wrong in one point each."""
    right = (0.75, 1.875, 1.125 / 2, 1.0)
    assert numbers(CHAT_SCRIPT, CHAT) == seconds(right)
    own = client.Stream.answer
    mistakes = {
        "TTFT from the event without output": (client.Stream, "_carries_output", lambda self, choice: True),
        "reasoning is no output": (
            client.Stream,
            "_carries_output",
            lambda self, choice: bool(choice["delta"].get("content")),
        ),
        "E2E to the last output": (
            client.Stream,
            "answer",
            lambda self, sent: dataclasses.replace(own(self, sent), end=self.outputs[-1]),
        ),
        "tokens are events": (
            client.Stream,
            "answer",
            lambda self, sent: dataclasses.replace(own(self, sent), output_tokens=len(self.outputs)),
        ),
        "TPOT by n": (latency, "tpot", lambda a: (latency.e2e(a) - latency.ttft(a)) / a.output_tokens),
        "TPOT with the first token's time": (latency, "tpot", lambda a: latency.e2e(a) / (a.output_tokens - 1)),
        "gaps from the sending": (latency, "gaps", lambda a: [a.outputs[0] - a.sent, a.outputs[1] - a.outputs[0]]),
    }
    for name, (where, attribute, wrong) in mistakes.items():
        with monkeypatch.context() as patch:
            patch.setattr(where, attribute, wrong)
            assert numbers(CHAT_SCRIPT, CHAT) != seconds(right), f"nothing notices: {name}"


# -- prompts and arrivals


def test_prompts_have_their_length_are_all_different_and_the_same_for_a_seed():
    prompts = load.random_ids(5, 40, 1000, seed=3)
    assert [len(prompt) for prompt in prompts] == [40] * 5
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert load.random_ids(5, 40, 1000, seed=3) == prompts
    assert load.random_ids(5, 40, 1000, seed=4) != prompts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("serve") / "model"
    write_tiny(folder, trained=True, mxfp4=True)
    return folder


def test_a_text_has_exactly_so_many_tokens(tiny):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    prompts = load.Words(tiny).prompts(3, 200, seed=1)
    assert [len(tokenizer.encode(prompt, add_special_tokens=False).ids) for prompt in prompts] == [200] * 3
    assert len(set(prompts)) == 3
    with pytest.raises(InputError, match="cannot be used as a tokenizer"):
        load.Words(tiny / "nowhere")


def test_arrivals_are_as_many_a_second_as_asked_and_start_at_once():
    times = load.arrivals(4000, 8.0, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.05)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert latency.percentile(gaps, 50) == pytest.approx(math.log(2) / 8, rel=0.1), "a Poisson process, not a beat"
    assert load.arrivals(3, math.inf, seed=1) == [0, 0, 0]
    assert load.arrivals(9, 2.0, seed=1) == load.arrivals(9, 2.0, seed=1) != load.arrivals(9, 2.0, seed=2)


def test_requests_are_sent_at_their_times_though_others_are_unanswered():
    now, sent = 50.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    async def send(item: str) -> str:
        sent.append((item, now))
        while len(sent) < 3:
            await asyncio.sleep(0)
        return item.upper()

    results = asyncio.run(load.at_these_times(send, ["a", "b", "c"], [0.0, 2.0, 2.5], sleep, lambda: now))
    assert results == ["A", "B", "C"]
    assert [item for item, _ in sent] == ["a", "b", "c"]
    assert now == 52.5


def test_so_many_are_under_way_and_results_keep_their_order():
    under_way, most = 0, 0

    async def send(item: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(10 - item):  # the later ones end first
            await asyncio.sleep(0)
        under_way -= 1
        return -item

    assert asyncio.run(load.so_many_at_a_time(send, list(range(10)), 4)) == [-item for item in range(10)]
    assert most == 4


# -- the command


@pytest.fixture
def serving() -> Iterator[Any]:
    """`serving(server)` runs it in a thread of its own, so that the command can have the main one."""
    stops = []

    def start(server: Server) -> Server:
        ready, loop = threading.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            async with server.running():
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(10)
        stops.append((loop, stop, thread))
        return server

    yield start
    for loop, stop, thread in stops:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


PLAIN = [Event({"choices": [{"text": "ab", "finish_reason": None}]}, seen=False)]
PLAIN += [Event({"choices": [{"text": "c", "finish_reason": "length"}]}, seen=False)]
PLAIN += [Event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 4}}, seen=False), DONE]


def bench(*words: object) -> int:
    return main(["bench", "serve", *map(str, words)])


SMALL = ("--prompts", 6, "--input-tokens", 12, "--output-tokens", 4)


def test_the_command_writes_a_record_for_each_load_and_warm_up_is_in_none(serving, tmp_path, capsys):
    server, file = serving(Server([PLAIN])), tmp_path / "serve.json"
    assert bench("--url", server.url, *SMALL, "--concurrency", 1, 3, "--warm-up", 2, "--json", file) == 0
    content = json.loads(file.read_text())
    assert records.problems(content) == []
    assert [record["concurrency"] for record in content["records"]] == [1, 3]
    for record in content["records"]:
        assert (record["requests"], record["succeeded"], record["failed"]) == (6, 6, 0)
        assert record["mean_prompt_tokens"] == 12
        assert record["mean_output_tokens"] == 4
        assert record["short_answers"] == 0
    assert content["engine"] == "vLLM 0.11.0"
    assert set(content["machine"]) == {"client"}, "where the server ran is not known"
    assert "environment" not in content, "nor with which variables"
    assert server.url not in file.read_text(), "a place of this machine is in the record"
    assert content["definitions"] == latency.DEFINITIONS
    out = capsys.readouterr().out
    assert all(f"  {name}: {meaning}" in out for name, meaning in latency.DEFINITIONS.items())
    assert "3 at a time: 6 of 6 requests" in out
    assert len(server.bodies) == 2 * (2 + 6)
    assert server.most_under_way <= 3


def test_what_is_asked_for_and_no_prompt_twice(serving):
    server = serving(Server([PLAIN]))
    assert bench("--url", server.url, *SMALL, "--concurrency", 1, 2, "--vocabulary", 50, "--seed", 5) == 0
    first = server.bodies[0]
    assert first["path"] == "/v1/completions"
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("gpt-oss", 4, 0)
    assert first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert first["ignore_eos"] is True
    assert all(len(body["prompt"]) == 12 and max(body["prompt"]) < 50 for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies), "a cache would answer"


def test_a_second_run_is_not_answered_from_the_first_ones_cache(serving, tmp_path, capsys):
    """Without a seed of the user's each run has another one, which its file and its output tell."""
    server, file = serving(Server([PLAIN])), tmp_path / "serve.json"
    seeds = []
    for _ in range(2):
        assert bench("--url", server.url, *SMALL, "--json", file) == 0
        seeds.append(json.loads(file.read_text())["settings"]["seed"])
        assert f"seed {seeds[-1]}" in capsys.readouterr().out
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)
    assert bench("--url", server.url, *SMALL, "--seed", seeds[0]) == 0
    assert [body["prompt"] for body in server.bodies[:8]] == [body["prompt"] for body in server.bodies[16:]]


def test_a_chat_is_words_and_standard_fields_are_no_others(serving, tiny):
    script = [Event({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}, seen=False)]
    server = serving(Server([[*script, Event(usage(4).content, seen=False), DONE]]))
    chat = ("--api", "chat", "--tokenizer", tiny, "--standard-fields")
    assert bench("--url", server.url, *SMALL, *chat) == 0
    first = server.bodies[0]
    assert first["path"] == "/v1/chat/completions"
    assert first["messages"][0]["content"].count(" ") == 12
    assert set(first) - {"path"} == {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}


def test_rates_are_points_of_their_own(serving, tmp_path):
    server, file = serving(Server([PLAIN])), tmp_path / "serve.json"
    assert bench("--url", server.url, *SMALL, "--rate", 200, "inf", 200, "--json", file) == 0
    content = json.loads(file.read_text())
    assert [(record["concurrency"], record["rate"]) for record in content["records"]] == [(None, 200.0), (None, "inf")]
    assert content["settings"]["rate"] == [200.0, "inf"]


def test_failed_requests_are_told_and_are_the_exit_status(serving, tmp_path, capsys):
    broken = [Status(500, {"error": {"message": "out of memory"}})]
    server, file = serving(Server([PLAIN, PLAIN, broken, PLAIN, broken, PLAIN])), tmp_path / "serve.json"
    assert bench("--url", server.url, *SMALL, "--json", file, "--warm-up", 0) == 1
    (record,) = json.loads(file.read_text())["records"]
    assert (record["succeeded"], record["failed"]) == (4, 2)
    assert record["failures"] == {"HTTP 500: out of memory": 2}
    assert "failed: 2 × HTTP 500: out of memory" in capsys.readouterr().out


def test_nothing_but_failures_is_an_error_and_no_file(serving, tmp_path, capsys):
    server = serving(Server([[Status(400, {"error": {"message": "ids are no prompt"}})]]))
    assert bench("--url", server.url, *SMALL, "--json", tmp_path / "serve.json") == 2
    said = capsys.readouterr()
    assert "none of 6 requests succeeded: 6 × HTTP 400: ids are no prompt" in said.out
    assert "no request succeeded" in said.err
    assert not (tmp_path / "serve.json").exists()


def test_points_before_a_ctrl_c_are_in_the_file(serving, tmp_path, monkeypatch):
    server, file, measured = serving(Server([PLAIN])), tmp_path / "serve.json", action._measure

    async def one_point(session, args, model, point, *rest):
        if point.concurrency == 2:
            raise KeyboardInterrupt
        return await measured(session, args, model, point, *rest)

    monkeypatch.setattr(action, "_measure", one_point)
    assert bench("--url", server.url, *SMALL, "--concurrency", 1, 2, "--json", file) == 130
    assert [record["concurrency"] for record in json.loads(file.read_text())["records"]] == [1]


def test_answers_that_are_too_short_are_told(serving, capsys):
    server = serving(Server([PLAIN]))
    assert bench("--url", server.url, "--prompts", 2, "--output-tokens", 5) == 0
    assert "2 answers are shorter than was asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "words", "message"),
    [
        (("a", "b"), (), "serves a, b; none was named with --model"),
        (("a",), ("--model", "b"), "serves a; got --model b"),
        ((), (), "serves no model"),
        (None, (), "answered 404, not with a list of models: Not Found"),
    ],
)
def test_a_model_that_is_not_served_is_told_with_those_that_are(models, words, message, serving, capsys):
    server = serving(Server([PLAIN], models=models))
    assert bench("--url", server.url, *SMALL, *words) == 2
    assert message in capsys.readouterr().err
    assert server.bodies == [], "nothing is asked in vain"


def test_a_server_that_lists_nothing_is_taken_at_the_users_word(serving):
    server = serving(Server([PLAIN], models=None))
    assert bench("--url", server.url.removesuffix("/v1"), *SMALL, "--model", "mine") == 0
    assert server.bodies[0]["model"] == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "http://127.0.0.1:9/v1"), "no server answers at http://127.0.0.1:9/v1"),
        (("--rate", "nan"), "--rate must be above 0, got nan"),
        (("--timeout", "inf"), "--timeout must be a number of seconds above 0"),
        (("--warm-up", -1), "--warm-up must be from 0"),
        (("--api", "chat"), "needs their tokenizer"),
    ],
)
def test_input_that_cannot_be_used_is_an_error_in_words(words, message, capsys):
    assert bench(*words) == 2
    assert message in capsys.readouterr().err


def test_without_the_http_client_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert bench() == 2
    assert "pip install 'npu-gptoss[bench]'" in capsys.readouterr().err


def test_a_slow_warm_up_is_in_no_number(serving, tmp_path, monkeypatch):
    """The first two answers take a hundred seconds longer; without a warm-up they would be seen."""
    file, own = tmp_path / "serve.json", client.ask

    def slow_at_first():
        count = iter(range(100))

        async def ask(session, url, api, body, clock):
            got = await own(session, url, api, body, clock)
            return dataclasses.replace(got, end=got.end + 100) if next(count) < 2 else got

        return ask

    longest = {}
    for warm_up in (2, 0):
        monkeypatch.setattr(action.client, "ask", slow_at_first())
        server = serving(Server([PLAIN]))
        assert bench("--url", server.url, *SMALL, "--warm-up", warm_up, "--json", file) == 0
        (record,) = json.loads(file.read_text())["records"]
        assert record["requests"] == 6
        longest[warm_up] = record["e2e_p99_ms"]
    assert longest[2] < 50_000 < longest[0]
