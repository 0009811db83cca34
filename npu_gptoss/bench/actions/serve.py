"""`bench serve`: an OpenAI-compatible server under load, as its clients see it."""

from __future__ import annotations

import argparse
import asyncio
import functools
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from npu_gptoss.bench import client, latency, load, records
from npu_gptoss.bench.actions import shared
from npu_gptoss.errors import InputError
from npu_gptoss.progress import bar, say

if TYPE_CHECKING:
    import aiohttp

SUMMARY = "an OpenAI-compatible server: TTFT, TPOT, ITL and throughput"
URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
IDS, WORDS = "token ids", "words"
WARM_UP_SEED = 1_000_003  # added, so that no counted prompt is in the server's cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, help=f"as an OpenAI client takes it (default: {URL})")
    parser.add_argument("--model", metavar="NAME", help="the served name (default: the only one there)")
    parser.add_argument("--api", choices=client.PATHS, default=client.COMPLETIONS, help="default: completions")
    parser.add_argument("--prompts", default=32, help="requests of each point (default: 32)", **shared.COUNT)
    parser.add_argument("--input-tokens", default=128, help="of each prompt (default: 128)", **shared.COUNT)
    parser.add_argument("--output-tokens", default=128, help="of each answer (default: 128)", **shared.COUNT)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--concurrency", help="requests at a time (default: 1)", **shared.COUNTS)
    how.add_argument(
        "--rate",
        nargs="+",
        type=float,
        metavar="X",
        action=shared.Once,
        help="requests a second, at random times; inf: all at once",
    )
    parser.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before those that count")
    parser.add_argument("--seed", type=int, help="of prompts and arrivals (default: another one each run)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="prompts are words of this checkpoint's tokenizer.json, not ids"
    )
    parser.add_argument("--vocabulary", default=load.VOCABULARY, help="ids are drawn below it", **shared.COUNT)
    parser.add_argument(
        "--standard-fields",
        action="store_true",
        help="send no ignore_eos, which is vLLM's: for servers that refuse it; answers may end early",
    )
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds of a request (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")


@dataclass(frozen=True)
class Point:
    """One load: `concurrency` requests at a time, or `rate` a second."""

    concurrency: int | None
    rate: float | None


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when a request failed."""
    _check(args)
    try:
        import aiohttp  # noqa: F401 - comes with vLLM, and is not needed for anything else here
    except ImportError:
        raise InputError("bench serve needs aiohttp, which is not installed: pip install 'npu-gptoss[bench]'") from None
    if args.seed is None:  # a server's cache would answer the prompts of the run before
        args.seed = random.SystemRandom().randrange(1 << 30)
    args.url = args.url.rstrip("/") if urlsplit(args.url).path.strip("/") else args.url.rstrip("/") + "/v1"
    return asyncio.run(_run(args))


def _check(args: argparse.Namespace) -> None:
    if args.warm_up < 0:
        raise InputError(f"--warm-up must be from 0, got {args.warm_up}")
    wrong = [rate for rate in args.rate or () if not rate > 0]
    if wrong:
        raise InputError(f"--rate must be above 0, got {wrong[0]:g}")
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise InputError(f"--timeout must be a number of seconds above 0, got {args.timeout:g}")
    if args.json is not None:
        records.check_place(args.json)
    if args.api == client.CHAT and args.tokenizer is None:
        raise InputError(
            "a chat takes text, and a text of so many tokens needs their tokenizer: name a checkpoint's folder with "
            "--tokenizer, or measure --api completions, which takes token ids"
        )


async def _run(args: argparse.Namespace) -> int:
    import aiohttp

    key = os.environ.get(KEY_VARIABLE)
    async with aiohttp.ClientSession(
        # as many connections as requests at a time; kept for less than servers do, whose usual five seconds could else
        # end just when the next request is sent
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        timeout=aiohttp.ClientTimeout(total=args.timeout),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    ) as session:
        model = await client.served_model(session, args.url, args.model)
        version = await client.server_version(session, args.url)
        print(f"{model} at {args.url}" + ("" if version is None else f", vLLM {version}") + f", seed {args.seed}")
        for name, meaning in latency.DEFINITIONS.items():
            print(f"  {name}: {meaning}")
        rows, failed = [], 0
        for number, point in enumerate(_points(args)):
            try:
                rows.append(await _measure(session, args, model, point, args.seed + number))
            except latency.NothingSucceeded as error:
                failed += args.prompts
                say(f"{_name(point)}: {error}")
                continue
            failed += rows[-1]["failed"]
            say("\n".join(latency.table(rows[-1])))
            _write(args, rows, version)  # now, because the next load may take long and be ended
    if not rows:
        raise InputError("no request succeeded; the reasons stand above")
    if args.json is not None:
        print(f"{args.json}: {len(rows)} records")
    return 1 if failed else 0


def _points(args: argparse.Namespace) -> list[Point]:
    if args.rate is not None:
        return [Point(None, rate) for rate in args.rate]
    return [Point(concurrency, None) for concurrency in args.concurrency or [1]]


def _number(rate: float | None) -> float | str | None:
    """As JSON takes it, which has no infinity."""
    return "inf" if rate == math.inf else rate


def _name(point: Point) -> str:
    return f"{point.concurrency} at a time" if point.rate is None else f"{point.rate:g} a second"


async def _measure(
    session: aiohttp.ClientSession, args: argparse.Namespace, model: str, point: Point, seed: int
) -> dict[str, Any]:
    prompts, warm_up = _prompts(args, args.prompts, seed), _prompts(args, args.warm_up, seed + WARM_UP_SEED)

    async def send(prompt: load.Prompt) -> client.Answer:
        answer = await client.ask(session, args.url, args.api, _body(args, model, prompt), time.perf_counter)
        progress.update()
        return answer

    with bar(len(prompts) + len(warm_up), _name(point), "request") as progress:
        await load.so_many_at_a_time(send, warm_up, point.concurrency or len(warm_up) or 1)
        if point.rate is None:
            answers = await load.so_many_at_a_time(send, prompts, point.concurrency)
        else:
            times = load.arrivals(len(prompts), point.rate, seed)
            answers = await load.at_these_times(send, prompts, times)
    return {
        "model": model,
        "api": args.api,
        "prompt": IDS if args.tokenizer is None else WORDS,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "concurrency": point.concurrency,
        "rate": _number(point.rate),
        **latency.summary(answers, args.output_tokens),
    }


def _prompts(args: argparse.Namespace, count: int, seed: int) -> list[load.Prompt]:
    if args.tokenizer is None:
        return load.random_ids(count, args.input_tokens, args.vocabulary, seed)
    return _words(args.tokenizer).prompts(count, args.input_tokens, seed)


@functools.lru_cache(maxsize=1)
def _words(directory: Path) -> load.Words:
    """Once for all points: a published tokenizer.json is 28 MB."""
    return load.Words(directory)


def _body(args: argparse.Namespace, model: str, prompt: load.Prompt) -> dict[str, Any]:
    asked = (
        {"prompt": prompt} if args.api == client.COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    )
    body = {
        "model": model,
        **asked,
        "max_tokens": args.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body if args.standard_fields else {**body, "ignore_eos": True}


def _write(args: argparse.Namespace, rows: Sequence[dict[str, Any]], version: str | None) -> None:
    if args.json is None:
        return
    left_out = {"action", "json", "tokenizer", "url"}  # places of one machine
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    content = records.document(
        "serve",
        torch.device("cpu"),
        rows,
        definitions=latency.DEFINITIONS,
        ceilings=[],
        price_per_hour=0.0,
        settings=settings | {"rate": args.rate and [_number(rate) for rate in args.rate]},
    )
    del content["dollars_per_gpu_hour"], content["environment"]
    # the server's machine is not known here: only where the client ran
    content["machine"] = {"client": content["machine"]["processor"]}
    content["engine"] = "an OpenAI-compatible server" if version is None else f"vLLM {version}"
    records.write(args.json, content)
