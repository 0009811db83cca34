"""Kills the engines of a real server under streams, and compares every token with those of an undisturbed run.

Each kind of request is asked without a fault first. Then the streams run, `AT_ONCE` at a time, and SIGKILL hits an
engine process whenever a chosen stream has begun.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from scripts import serve_here
from tests.endure.server import NAME, Served, Stack
from tests.serving.in_flight import engines_of

AT_ONCE = 10
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
PROPERTIES = {"a": {"enum": list("xyz")}, "b": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
LONG = {"max_tokens": 96, "ignore_eos": True, "prompt": [200006, 1428, 200008, 4827, 382, 220, 18]}
TALK = {"max_tokens": 120, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 11}
# route, fields
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", LONG | GREEDY),
    "greedy, log-probabilities": ("completions", LONG | GREEDY | {"logprobs": 2}),
    "greedy, penalties": ("completions", LONG | GREEDY | {"presence_penalty": 0.7, "frequency_penalty": 0.3}),
    "seeded": ("completions", LONG | SEEDED),
    "seeded, n": ("completions", LONG | SEEDED | {"n": 2}),
    "seeded, stop string": ("completions", LONG | SEEDED | {"stop": ["e "], "min_tokens": 40}),
    "structured": ("chat/completions", TALK | SEEDED | {"response_format": FORMAT}),
    "chat": ("chat/completions", TALK | GREEDY),
    "chat, seeded, n": ("chat/completions", TALK | SEEDED | {"n": 2}),
    "responses": ("responses", {"input": "What is 5 + 2?", "temperature": 0, "max_output_tokens": 120}),
    "messages": ("messages", {"messages": TALK["messages"], "temperature": 0, "max_tokens": 120}),
}


async def ask(session: aiohttp.ClientSession, url: str, kind: str, seen: Callable[[], None] = lambda: None) -> Any:
    """Streams a request. Returns what the client has got, without what differs by nature; `seen` counts its events."""
    route, fields = KINDS[kind]
    more = {"stream_options": {"include_usage": True}, "return_token_ids": True} if "completions" in route else {}
    got: dict[str, Any] = {}
    async with session.post(f"{url}/v1/{route}", json=fields | more | {"model": NAME, "stream": True}) as response:
        if response.status != 200:
            return {"status": response.status, "body": await response.text()}
        async for line in response.content:
            text = line.decode().removeprefix("data: ").strip()
            if not line.startswith(b"data: ") or text == "[DONE]":
                continue
            seen()
            _add(got, json.loads(text))
    return got


def _add(got: dict[str, Any], event: Mapping[str, Any]) -> None:
    """Adds an event, so that its pieces' sizes do not matter."""
    if "error" in event:
        got["error"] = event["error"]
    for choice in event.get("choices", ()):
        mine = got.setdefault(
            str(choice["index"]), {"tokens": [], "text": "", "reasoning": "", "finish": None, "top": []}
        )
        delta = choice.get("delta") or {}
        mine["tokens"] += choice.get("token_ids") or []
        mine["text"] += choice.get("text") or delta.get("content") or ""
        mine["reasoning"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
        mine["finish"] = choice.get("finish_reason") or mine["finish"]
        mine["top"] += ((choice.get("logprobs") or {}).get("tokens")) or []
    usage = event.get("usage")
    if "choices" in event and usage:
        got["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]]
    if "choices" not in event and event.get("type", "").endswith(("delta", "content_block_delta")):
        delta = event["delta"]
        words = delta if isinstance(delta, str) else delta.get("text") or delta.get("thinking") or ""
        got[event["type"]] = got.get(event["type"], "") + words
    if event.get("type") == "response.completed":
        got["usage"] = event["response"]["usage"]["output_tokens"]


async def run(process: Any, url: str, asked: Run) -> dict[str, Any]:
    """Returns the record of a run against a server that is ready."""
    streams, kills, kinds = asked.streams, asked.kills, asked.kinds
    chosen, found = random.Random(asked.seed), Counter()
    left = asyncio.Semaphore(AT_ONCE)
    killed: list[asyncio.Future[bool]] = []
    pauses: list[float] = []
    differences: list[Any] = []
    each = max(1, streams // max(kills, 1))
    plan = {number * each for number in range(kills)}  # these streams kill after some of their events
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        wanted = {kind: await ask(session, url, kind) for kind in kinds}
        assert not any("status" in each or "error" in each for each in wanted.values()), wanted
        assert wanted == {kind: await ask(session, url, kind) for kind in kinds}, "not repeatable without a fault"

        async def health() -> bool:
            """Returns whether /health says that there is no engine, and when to ask again."""
            await asyncio.sleep(2.5)  # the first second may pass before the death is seen
            async with session.get(f"{url}/health") as response:
                return response.status == 503 and "anew" in await response.text() and "Retry-After" in response.headers

        async def stream(number: int) -> None:
            kind = kinds[number % len(kinds)]
            after, last = chosen.randrange(1, 20), time.monotonic()
            events, longest = 0, 0.0

            def seen() -> None:
                nonlocal events, last, longest
                events += 1
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                if number in plan and events == after and (alive := engines_of(process.pid)):
                    os.kill(chosen.choice(alive), signal.SIGKILL)
                    killed.append(asyncio.ensure_future(health()))

            async with left:
                last = time.monotonic()
                got = await ask(session, url, kind, seen)
            pauses.append(longest)
            if got == wanted[kind]:
                found["equal"] += 1
                return
            found[
                "lost" if "error" in got or "status" in got or len(str(got)) < len(str(wanted[kind])) else "different"
            ] += 1
            differences.append({"kind": kind, "got": got, "wanted": wanted[kind]})

        await asyncio.gather(*map(stream, range(streams)))
        told = await asyncio.gather(*killed)
        await ask(session, url, kinds[0])  # an engine reports its gauges with its steps only
        for _ in range(20):
            async with session.get(f"{url}/metrics") as response:
                lines = [line for line in (await response.text()).splitlines() if line.startswith(GAUGES)]
            if at_rest := all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines):
                break
            await asyncio.sleep(0.5)
    return {
        "kills": len(killed),
        "seen by /health": sum(told),
        "equal": found["equal"],
        "lost": found["lost"],
        "different": found["different"],
        "longest pause, s": round(max(pauses, default=0.0), 1),
        "differences": differences[:5],
        "at rest": at_rest,
    }


@dataclass(frozen=True)
class Run:
    """kinds: names of KINDS; all by default."""

    stack: str = "cpu"
    engines: int = 1
    streams: int = 200
    kills: int = 20
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)


def served(asked: Run, model: Path, log: Path, then: Callable[[Any], None] = lambda process: None) -> dict[str, Any]:
    """Returns the record of a run. then: called with the server, which has no restart left."""
    variables = {"NPU_GPTOSS_ENGINE_RESTARTS": str(max(1, asked.kills))}
    if asked.stack == "cuda":
        variables["VLLM_BATCH_INVARIANT"] = "1"  # tokens in a batch are those alone
    engines = ("--data-parallel-size", str(asked.engines)) if asked.engines > 1 else ()
    server = Served(Stack(asked.stack), model, log, variables=variables, flags=engines).start()
    try:
        record = asyncio.run(run(server.process, server.url, asked))
        then(server.process)
        return record
    finally:
        serve_here.stop(server.process)
