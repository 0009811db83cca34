"""Generate text with the offline engine. With --json, standard output is one JSON list and nothing else."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

from npu_gptoss.engine.chat import Chats, Reading
from npu_gptoss.engine.device import limit_threads
from npu_gptoss.engine.engine import MAX_BATCH_SIZE, Engine
from npu_gptoss.engine.launched import device_and_ranks, is_rank_0
from npu_gptoss.engine.options import OPTIONS, add_options
from npu_gptoss.engine.prompts import PromptEntry, read_prompts_file
from npu_gptoss.engine.request import Request, Result, SamplingParams
from npu_gptoss.engine.text import TextCodec
from npu_gptoss.errors import InputError
from npu_gptoss.harmony.conversation import REASONING_EFFORTS
from npu_gptoss.harmony.parser import Kind
from npu_gptoss.model.config import config_file

SECONDS_BETWEEN_REPORTS = 2.0
ENGINE_OPTIONS = ("dtype", "max_batch_tokens", "block_size", "num_blocks", "graphs", "weights")  # named so there, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="directory of a gpt-oss checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="a text to continue, or with --chat a user's message")
    source.add_argument("--prompt-ids", metavar="1,2,3", help="token ids to continue")
    source.add_argument(
        "--prompts-file",
        type=Path,
        metavar="F.jsonl",
        help='one {"prompt": …}, {"prompt_token_ids": […]} or {"messages": […]} a line',
    )
    parser.add_argument("--chat", action="store_true", help="texts are user messages in harmony, gpt-oss's chat format")
    parser.add_argument("--reasoning-effort", choices=REASONING_EFFORTS, default="medium", help="of chats")
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="the date that chats show the model (default: today)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this probability")
    parser.add_argument("--top-k", type=int, metavar="N", help="0 (default) takes all tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="of every prompt; the same seed gives the same tokens")
    parser.add_argument("--logprobs", type=int, metavar="K", help="report each token's log-probability and the K best")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's stop tokens")
    parser.set_defaults(**{field.name: field.default for field in fields(SamplingParams)})
    add_options(parser, *OPTIONS)
    parser.add_argument("--capture-sizes", metavar="1,2,4,8", help="batch sizes of the graphs (default: as needed)")
    parser.add_argument("--json", action="store_true", help="print one JSON list, an object a prompt")


def run(args: argparse.Namespace) -> int:
    options = vars(args)
    params = SamplingParams(**{field.name: options[field.name] for field in fields(SamplingParams)})
    entries = _entries(args)
    sizes = None if args.capture_sizes is None else _whole_numbers("--capture-sizes", args.capture_sizes)
    config_file(args.model)
    if any(entry.form == "prompt" for entry in entries):
        TextCodec(args.model).expect()  # before minutes of loading
    with _standard_output_kept_clean() as output, device_and_ranks(args.device, args.share_experts) as (device, ranks):
        speaks = is_rank_0()  # the others compute the same
        chats = Chats(args.model) if any(entry.form == "messages" for entry in entries) else None
        start = time.perf_counter()
        given = {name: options[name] for name in ENGINE_OPTIONS}
        given |= {"device": device, "graph_sizes": sizes, "ranks": ranks, "progress": speaks}
        engine = Engine(args.model, max_batch_size=min(MAX_BATCH_SIZE, len(entries)), **given)
        limit_threads(engine.config, engine.device)
        if speaks:
            _say(f"loaded {args.model} on {engine.device} in {time.perf_counter() - start:.1f} s")
        prompts, each, readings = [], [], []
        for entry in entries:
            ids, reading = _prompt(engine, chats, entry, args)
            prompts.append(ids)
            readings.append(reading)
            # a chat ends where harmony says so, also when the checkpoint lists fewer stop tokens
            stops = chats.stop_token_ids if reading is not None and not args.ignore_eos else ()
            each.append(replace(params, stop_token_ids=stops))
        streamed = speaks and not args.json and readings[0] is not None and len(entries) == 1 and args.logprobs is None
        watch = _Watch(engine, readings, output if streamed else None, speaks)
        results = engine.generate(prompts, each, on_step=watch)
        engine.close()
    if not speaks:
        return 0
    if args.json:
        rows = [_row(result, reading) for result, reading in zip(results, readings, strict=True)]
        print(json.dumps(rows, allow_nan=False))
    elif not streamed:
        for entry, result, reading in zip(entries, results, readings, strict=True):
            _print_text(entry, result, reading, alone=len(entries) == 1)
    return 0


def _entries(args: argparse.Namespace) -> list[PromptEntry]:
    if args.prompts_file is not None:
        entries = read_prompts_file(args.prompts_file)
    elif args.prompt is not None:
        entries = [PromptEntry("--prompt", "prompt", args.prompt, {})]
    else:
        ids = _whole_numbers("--prompt-ids", args.prompt_ids)
        entries = [PromptEntry("--prompt-ids", "prompt_token_ids", ids, {})]
    if not args.chat:
        return entries
    chats = []
    for entry in entries:
        if entry.form == "prompt_token_ids":
            raise InputError(
                f"{entry.label}: --chat turns texts into messages, but these are token ids already", field="--chat"
            )
        if entry.form == "prompt" and not entry.value:
            raise InputError(f"{entry.label}: the message is empty", field="--prompt")
        messages = entry.value if entry.form == "messages" else [{"role": "user", "content": entry.value}]
        chats.append(replace(entry, form="messages", value=messages))
    return chats


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(f"{option} must be whole numbers with commas between, got {text!r}", field=option) from None


def _prompt(
    engine: Engine, chats: Chats | None, entry: PromptEntry, args: argparse.Namespace
) -> tuple[list[int], Reading | None]:
    """The entry as checked token ids, with the reading of its answer if it is a chat; an error names its place."""
    try:
        if entry.form != "messages":
            reading, ids = None, engine.encode(entry.value)
        else:
            assert chats is not None
            fields = {"messages": entry.value, **entry.options}
            request = chats.read(fields, date=args.date, effort=args.reasoning_effort)
            reading, ids = chats.reading(request), engine.encode(chats.prompt(request))
        engine.check_length(ids)
    except InputError as error:
        raise error.at(entry.label) from None
    return ids, reading


def _row(result: Result, reading: Reading | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "logprobs": None,
    }
    if result.logprobs is not None:
        row["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
            }
            for entry in result.logprobs
        ]
    if reading is not None:
        row |= {"message": reading.message, "finish_reason": reading.choice.finish_reason}
    return row


def _print_text(entry: PromptEntry, result: Result, reading: Reading | None, *, alone: bool) -> None:
    if not alone:
        print(f"== {entry.label} ({result.finish_reason}, {len(result.token_ids)} tokens)")
    if reading is None:
        print(result.text if result.text is not None else ",".join(map(str, result.token_ids)))
    else:
        for part in reading.choice.turn.parts:
            print(f"{_title(part.kind, part.name)}{part.text}")
    for logprob in result.logprobs or ():
        print(f"  {logprob.token_id}: {logprob.logprob:.4f}  {'  '.join(f'{t}: {p:.4f}' for t, p in logprob.top)}")


def _title(kind: Kind, name: str | None) -> str:
    return {Kind.REASONING: "[reasoning] ", Kind.ANSWER: "[answer] ", Kind.CALL: f"[call of {name}] "}[kind]


class _Watch:
    """Called after each step: reads the answers of chats, writes a single one as it comes, and reports the progress.

    reported: lines on standard error, now and then and at the end.
    """

    def __init__(
        self, engine: Engine, readings: Sequence[Reading | None], output: TextIO | None, reported: bool
    ) -> None:
        self._engine, self._readings, self._output, self._reported = engine, readings, output, reported
        self._start = self._last = time.perf_counter()

    def __call__(self, requests: Sequence[Request]) -> None:
        for request, reading in zip(requests, self._readings, strict=True):
            events = reading.update(request, self._engine.cancel) if reading is not None else ()
            for event in events if self._output is not None else ():
                title = _title(event.part.kind, event.part.name) if event.what == "begun" else ""
                self._output.write(title + event.text + ("\n" if event.what == "ended" else ""))
                self._output.flush()
        now, done = time.perf_counter(), sum(request.finish_reason is not None for request in requests)
        if self._reported and (done == len(requests) or now - self._last >= SECONDS_BETWEEN_REPORTS):
            self._last, tokens = now, sum(request.num_generated for request in requests)
            speed = tokens / (now - self._start)
            _say(f"{done} of {len(requests)} prompts done, {tokens} tokens, {speed:.1f} tokens/s")


def _say(text: str) -> None:
    print(f"npu-gptoss generate: {text}", file=sys.stderr, flush=True)


@contextmanager
def _standard_output_kept_clean() -> Iterator[TextIO]:
    """Sends the output of libraries, from Python or from C, to standard error; yields standard output, for the
    answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        is_descriptor = sys.stdout.fileno() == 1
    except (OSError, ValueError):  # another object, as in tests
        is_descriptor = False
    try:
        os.dup2(2, 1)
        answer = os.fdopen(os.dup(kept), "w") if is_descriptor else nullcontext(sys.stdout)
        with answer as output, redirect_stdout(sys.stderr):
            yield output
    finally:
        os.dup2(kept, 1)
        os.close(kept)
