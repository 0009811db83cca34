"""Serves checkpoints with vLLM's `LLM` on the emulated 910B, each in a process forked from this one.

Runs in the emulated environment, started by `test_ascend_emulated.py`: reads the path of a job a line and answers DONE.
What takes long, importing torch_npu and vLLM, is done once, before the first fork; no device is touched by then.

A job holds `checkpoint`, `options` (of `LLM`), `rounds` (prompts of one call to `generate` each, and what is spoilt
meanwhile), `spoil` (from the start on), `machine` (what differs in the emulated machine), `variables` (of the
environment), `log`, and `out`, where for each round goes a list of `{tokens, logprobs}`, or an error's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


@contextlib.contextmanager
def updates_dropped() -> Iterator[None]:
    """Graphs replay with the lengths of their capture; only the events come."""
    from npu_gptoss.serving.ascend import full_graph

    def update(stream: Any, call: Any, handle: Any, event: Any, lengths: Any) -> None:
        event.record(stream)

    with mock.patch.object(full_graph, "update", update):
        yield


@contextlib.contextmanager
def updates_late() -> Iterator[None]:
    """Each replay gets the lengths of the one before."""
    from npu_gptoss.serving.ascend import full_graph

    right, before = full_graph.update, {}

    def update(stream: Any, call: Any, handle: Any, event: Any, lengths: Any) -> None:
        key = id(handle)
        right(stream, call, handle, event, before.get(key, lengths))
        before[key] = lengths

    with mock.patch.object(full_graph, "update", update):
        yield


@contextlib.contextmanager
def replay_dropped() -> Iterator[None]:
    import torch

    with mock.patch.object(torch.npu.NPUGraph, "replay"):
        yield


@contextlib.contextmanager
def block_table_rebound() -> Iterator[None]:
    """Graphs are captured with a copy of the block table, which nobody fills."""
    from npu_gptoss.serving.ascend.attention import AscendSinkMetadataBuilder

    right = AscendSinkMetadataBuilder.build_for_graph_capture

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = right(self, *args, **kwargs)
        build.kept.append(metadata.block_table.clone())
        return dataclasses.replace(metadata, block_table=build.kept[-1])

    build.kept = []
    with mock.patch.object(AscendSinkMetadataBuilder, "build_for_graph_capture", build):
        yield


@contextlib.contextmanager
def window_of_129() -> Iterator[None]:
    from npu_gptoss.attention import ascend

    with mock.patch.object(ascend, "keys_before", lambda window: window):
        yield


@contextlib.contextmanager
def sinks_dropped() -> Iterator[None]:
    from npu_gptoss.attention import ascend

    right = ascend.call_arguments
    with mock.patch.object(ascend, "call_arguments", lambda *a, **k: {**right(*a, **k), "learnable_sink": None}):
        yield


@contextlib.contextmanager
def interleaved_weights() -> Iterator[None]:
    """The checkpoint's columns go to the activation of halves, as in vllm-ascend's own experts."""
    from npu_gptoss.moe import ascend

    with mock.patch.object(ascend, "halves", lambda columns: columns):
        yield


@contextlib.contextmanager
def biases_in_bf16() -> Iterator[None]:
    from npu_gptoss.moe import ascend

    right = ascend.grouped_mlp

    def grouped_mlp(rows: Any, experts: Any, *group_list: Any) -> Any:
        import torch

        biases = {name: getattr(experts, name).to(torch.bfloat16) for name in ("gate_up_proj_bias", "down_proj_bias")}
        return right(rows, dataclasses.replace(experts, **biases), *group_list)

    from npu_gptoss.serving.ascend import moe

    with mock.patch.object(moe, "grouped_mlp", grouped_mlp):
        yield


@contextlib.contextmanager
def upstream_lists() -> Iterator[None]:
    """The query list as vllm-ascend's builder makes it for a padded decode step: one short of the rows."""
    from npu_gptoss.attention import ascend

    right = ascend.call_arguments

    def arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
        ours = right(*args, **kwargs)
        return {**ours, "actual_seq_qlen": ours["actual_seq_qlen"][:-1] or [1]}

    with mock.patch.object(ascend, "call_arguments", arguments):
        yield


@contextlib.contextmanager
def one_call_for_all() -> Iterator[None]:
    """Shared prefixes are not counted."""
    from npu_gptoss.attention import ascend
    from npu_gptoss.serving.ascend import full_graph

    right = ascend.parts
    with (
        mock.patch.object(ascend, "parts", lambda metadata, blocks, size: right(metadata, 1 << 30, size)),
        mock.patch.object(full_graph, "fits_one_call", return_value=True),
    ):
        yield


def spoilt(name: str | None) -> contextlib.AbstractContextManager[None]:
    return globals()[name]() if name else contextlib.nullcontext()


def generate(engine: Any, prompts: list[list[int]], tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    if isinstance(engine, LLM):
        answers = engine.generate(inputs, sampling, use_tqdm=False)
    else:
        answers = asyncio.get_event_loop().run_until_complete(_together(engine, inputs, sampling))
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [[step[token].logprob for token in range(vocabulary)] for step in answer.outputs[0].logprobs],
        }
        for answer in answers
    ]


async def _together(engine: Any, inputs: list[Any], sampling: Any) -> list[Any]:
    async def one(number: int, prompt: Any) -> Any:
        async for answer in engine.generate(prompt, sampling, f"request-{number}"):
            last = answer
        return last

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(inputs)))


def start(checkpoint: str, options: dict[str, Any]) -> Any:
    """`LLM`, or with data parallelism the engine of the server, which starts one engine core a rank."""
    settings = {"skip_tokenizer_init": True, "max_logprobs": -1, "seed": 0, **options}
    if "data_parallel_size" not in options:
        from vllm import LLM

        return LLM(checkpoint, **settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    asyncio.set_event_loop(asyncio.new_event_loop())
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=checkpoint, **settings))


def serve(job: dict[str, Any]) -> None:
    from vllm.plugins import load_general_plugins

    from npu_gptoss.emulator import context
    from npu_gptoss.serving import compat

    context.set_default(dataclasses.replace(context.current(), **job["machine"]))
    load_general_plugins()
    results = []
    with spoilt(job["spoil"]):
        engine = start(job["checkpoint"], job["options"])
        states = {entry.patch.name: entry.state for entry in compat.status() if entry.patch.name.startswith("ascend")}
        print("PATCHES", json.dumps(states))
        for turn in job["rounds"]:
            try:
                with spoilt(turn.get("spoil")):
                    results.append(generate(engine, turn["prompts"], turn["tokens"], job["vocabulary"]))
            except Exception as error:  # what the operators refuse; the engine is of no use afterwards
                results.append(f"{type(error).__name__}: {error}")
                break
    Path(job["out"]).write_text(json.dumps(results))


def child(job: dict[str, Any]) -> None:
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["variables"])
    code = 1
    try:
        serve(job)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever engines and process groups still want to say at exit


def main() -> None:
    import torch_npu  # noqa: F401
    from vllm import LLM  # noqa: F401

    gc.collect()
    gc.freeze()
    print("READY", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(Path(line.strip()).read_text()))
        os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # workers that the job left behind
        print("DONE", flush=True)


if __name__ == "__main__":
    main()
