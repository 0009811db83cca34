"""Host time of a token of a streamed chat: the front end's handler against vLLM's own, on vLLM 0.33.

    .venv-vllm033/bin/python -m tests.serving.front_end_time MODEL [--streams 1 64 256] [--json FILE]

The engine core is a script that yields one token a step for each stream. Everything else of an API server's process is
real: AsyncLLM, its detokenizer, the handler. Each side runs in a process of its own. Time is CPU time of that process
between the first and the last token, over the number of tokens, in microseconds. `engine` is AsyncLLM alone, without a
handler and without a detokenizer: what no front end can save. On a shared machine only the ratios of one run mean
something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.serving.scripted import Core, have_platform

SIDES = ("engine", "front end", "vLLM")
TOKENS = 400  # of each stream
RUNS = 3  # the least of these counts
WORDS = " and".join(f" number {number}" for number in range(200))
TEXT = f"<|channel|>analysis<|message|>{WORDS}<|end|><|start|>assistant<|channel|>final<|message|>{WORDS}"


class StepCore(Core):
    """Yields a token of each stream in every step, as an engine does."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(lambda prompt: "")
        self.tokens = tokens
        self.active: dict[str, int] = {}
        self.arrived = asyncio.Event()
        self.expected = 0  # streams; no step before they are there

    async def add_request_async(self, request: Any) -> None:
        self.active[request.request_id] = 0
        if len(self.active) >= self.expected:
            self.arrived.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.active.pop(name, None)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        while not self.active or not self.arrived.is_set():
            await self.arrived.wait()
            if not self.active:
                self.arrived.clear()
        outputs = []
        for name, number in list(self.active.items()):
            last = number + 1 == len(self.tokens)
            reason = FinishReason.LENGTH if last else None
            outputs.append(EngineCoreOutput(name, [self.tokens[number]], finish_reason=reason))
            self.active[name] = number + 1
            if last:
                del self.active[name]
        await asyncio.sleep(0)
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())


async def measured(model: str, side: str, streams: list[int]) -> list[float]:
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from npu_gptoss.harmony.library import load_encoding

    flags = ["--model", model, "--max-model-len", "4096", "--max-num-seqs", "512"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    core = StepCore(load_encoding(Path(model)).encode(TEXT, allowed_special="all")[:TOKENS])
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)
    async with build_async_engine_client(arguments) as engine:
        from starlette.datastructures import State

        state = State()
        await init_app_state(engine, state, arguments, ("generate",))
        found = []
        for count in streams:
            await run(engine, state, core, side, min(count, 2))
            found.append(min([await run(engine, state, core, side, count) for _ in range(RUNS)]))
        return found


async def run(engine: Any, state: Any, core: StepCore, side: str, count: int) -> float:
    """Microseconds of CPU time a token."""
    core.expected = count
    core.arrived.clear()
    begun = 0.0

    async def stream(number: int) -> None:
        nonlocal begun
        async for _ in await opened(engine, state, side, number):
            begun = begun or time.process_time()

    await asyncio.gather(*(stream(number) for number in range(count)))
    return (time.process_time() - begun) / (count * TOKENS) * 1e6


async def opened(engine: Any, state: Any, side: str, number: int) -> Any:
    if side != "engine":
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        messages = [{"role": "user", "content": f"Question {number}."}]
        body = {
            "model": state.args.model,
            "messages": messages,
            "stream": True,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        return await state.openai_serving_chat.create_chat_completion(ChatCompletionRequest.model_validate(body))
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(max_tokens=TOKENS, detokenize=False, output_kind=RequestOutputKind.DELTA)
    return engine.generate(tokens_input([1, 2, 3]), params, f"{number}-{time.monotonic_ns()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint of gpt-oss; only its tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        have_platform()
        print("measured", json.dumps(asyncio.run(measured(options.model, options.side, options.streams))))
        return
    times = {}
    for side in SIDES:
        environment = os.environ | {"NPU_GPTOSS": "0" if side == "vLLM" else "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "npu_gptoss"}
        own = ["--side", side, "--streams", *map(str, options.streams)]
        command = [sys.executable, "-m", "tests.serving.front_end_time", options.model, *own]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("measured ")), None)
        if line is None:
            raise SystemExit(f"{side}: {done.stderr[-3000:]}")
        times[side] = json.loads(line.removeprefix("measured "))
    print(
        f"{'streams':>8} {'engine':>10} {'front end':>10} {'vLLM':>10}   "
        "front end / vLLM, and without the engine's share"
    )
    rows = []
    for number, count in enumerate(options.streams):
        engine, ours, stock = (times[side][number] for side in SIDES)
        row = {"streams": count, "engine_us": engine, "front_end_us": ours, "vllm_us": stock}
        rows.append(row | {"ratio": ours / stock, "ratio_of_handlers": (ours - engine) / (stock - engine)})
        print(
            f"{count:>8} {engine:>10.1f} {ours:>10.1f} {stock:>10.1f}   "
            f"{ours / stock:.2f}, {rows[-1]['ratio_of_handlers']:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"unit": "microseconds of CPU time a token", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
