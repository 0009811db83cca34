"""vLLM's whole server over a script in the place of its engine core: `python -m tests.serving.scripted MODEL --port N`.

Everything but the engine core is vLLM's own, with the plugin: routes, handlers, AsyncLLM, metrics. So each release
can be asked over HTTP on a machine that its engine does not run on. The model writes the text of a rule for the prompt.
Without a rule that fits, it writes the last message of the prompt as harmony, control tokens included, or a prompt that
is no conversation unchanged. `--rules FILE` is JSON: a list of [regular expression, harmony text]; the first that is
found in the prompt applies. In the model's text, `SAMPLING` stands for the request that the engine got, as JSON, at
`ERROR` the engine ends the request with an error, at `PAUSES` as an operator's pause does, and at each
`DIES` it dies, once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

START, MESSAGE, END = 200006, 200008, 200007
TURN_ENDS = (200002, 200012)  # <|return|>, <|call|>
SAMPLING, ERROR, PAUSES, DIES = "@sampling@", "@error@", "@pauses@", "@dies@"
Reply = Callable[[Sequence[int]], str]  # the prompt's tokens -> what the model writes


def by_rules(rules: Sequence[tuple[str, str]]) -> Reply:
    def reply(prompt: Sequence[int]) -> str:
        from npu_gptoss.harmony.library import load_encoding

        library = load_encoding()
        text = library.decode(prompt)
        for pattern, written in rules:
            if re.search(pattern, text, re.DOTALL):
                return written
        return library.decode(_last_of_user(list(prompt), library.encode("user")))

    return reply


def _last_of_user(prompt: list[int], role: list[int]) -> list[int]:
    """The text of the last message of the user. Control tokens within it are letters."""
    starts = [place for place, token in enumerate(prompt) if token == START]
    if not starts:
        return prompt
    for start in reversed(starts):
        first = start + 1 + len(role) + 1
        if prompt[start + 1 : first] == [*role, MESSAGE]:
            return prompt[first : prompt.index(END, first)]
    return []


class Core:
    """The interface that AsyncLLM expects of its engine core. `bite`: tokens in one output."""

    engine_ranks_managed = (0,)
    # of all engines, by the request's first id: its prompt's length; before how many tokens an engine dies
    begun: ClassVar[dict[str, int]] = {}
    deaths: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, reply: Reply, bite: int = 2) -> None:
        self.reply, self.bite = reply, bite
        self.resources = SimpleNamespace(engine_dead=False, engine_manager=None)
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.aborted: set[str] = set()
        self._tasks: set[Any] = set()

    async def add_request_async(self, request: Any) -> None:
        task = asyncio.create_task(self._write(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, request: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.engine.exceptions import EngineDeadError

        from npu_gptoss.harmony.library import load_encoding

        library, params = load_encoding(), request.sampling_params
        name, tokens, deaths = request.request_id.partition("-again")[0], [], []
        prompt = request.prompt_token_ids[: self.begun.setdefault(name, len(request.prompt_token_ids))]
        sent, text = len(request.prompt_token_ids) - len(prompt), self.reply(prompt)
        if SAMPLING in text:
            text = text.replace(SAMPLING, json.dumps(told(request, library)).replace("<|", r"<\u007c"))
        text, fails, _ = (*re.split(f"({ERROR}|{PAUSES})", text, maxsplit=1), "", "")[:3]
        for part in text.split(DIES):
            tokens += library.encode(part, allowed_special="all")
            deaths.append(len(tokens))
        left = self.deaths.setdefault(name, deaths[:-1])
        tokens = tokens[: sent + params.max_tokens] or [TURN_ENDS[0]]
        end = sent
        while end < len(tokens) or (left and left[0] == end):
            if request.request_id in self.aborted:
                return
            if left and left[0] == end:
                del left[0]
                self.resources.engine_dead = True
                self.outputs.put_nowait(EngineDeadError())
                return
            first, end = end, min(end + self.bite, left[0] if left and left[0] > end else len(tokens), len(tokens))
            part = tokens[first:end]
            last = end >= len(tokens) and not fails and not (left and left[0] == end)
            stopped = part[-1] in TURN_ENDS
            reason = (FinishReason.STOP if stopped else FinishReason.LENGTH) if last else None
            output = EngineCoreOutput(
                request.request_id,
                part,
                new_logprobs=_logprobs(part) if params.logprobs is not None else None,
                finish_reason=reason,
                stop_reason=part[-1] if last and stopped else None,
            )
            self._put(output)
            await asyncio.sleep(0)
        if fails == ERROR:
            self._put(failed(request.request_id))
        elif fails == PAUSES:
            self._put(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))

    def _put(self, output: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        self.outputs.put_nowait(EngineCoreOutputs(outputs=[output], timestamp=time.monotonic()))

    async def get_output_async(self) -> Any:
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted.update(request_ids)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_async"):
            raise AttributeError(name)

        async def nothing(*_: Any, **__: Any) -> None:
            """Answers the calls of a server's start and end."""

        return nothing

    def dp_engines_running(self) -> bool:
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks:
            task.cancel()


def told(request: Any, library: Any) -> dict[str, Any]:
    """The prompt, sampling and scheduling of an EngineCoreRequest."""
    params = request.sampling_params
    names = [name for name in params.__struct_fields__ if not name.startswith("_") and name != "structured_outputs"]
    found = {name: getattr(params, name) for name in names}
    structure = params.structured_outputs
    found["structured_outputs"] = None if structure is None else {k: v for k, v in vars(structure).items() if v}
    found["prompt"] = library.decode(request.prompt_token_ids)
    for name in ("priority", "cache_salt", "reasoning_ended", "session_id"):
        found[name] = getattr(request, name, None)
    return json.loads(json.dumps(found, default=repr))


def failed(request_id: str) -> Any:
    """The output by which a release's engine ends one request with an error."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from npu_gptoss.serving.compat.engine.failed_requests import FAILED

    if hasattr(FinishReason, "ERROR"):
        return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT, stop_reason=f"{FAILED}it broke.")


def _logprobs(tokens: Sequence[int]) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    ids = np.array([[token, token + 1] for token in tokens])
    values = np.array([[-0.5, -0.25]] * len(tokens), dtype=np.float32)
    ranks = np.full(len(tokens), 2, dtype=np.int64)
    return LogprobsLists(ids, values, ranks, *([None] * (len(LogprobsLists._fields) - 3)))


def have_platform() -> None:
    """Tell a vLLM that was installed without a device that this is a CPU."""
    import vllm.platforms as platforms

    if not platforms.current_platform.device_type:
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()


def main(arguments: list[str]) -> None:
    rules: list[tuple[str, str]] = []
    if "--rules" in arguments:
        place = arguments.index("--rules")
        rules = json.loads(Path(arguments[place + 1]).read_text())
        del arguments[place : place + 2]
    os.environ["VLLM_PLUGINS"] = ",".join(("npu_gptoss", "npu_gptoss_cpu"))
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    os.environ.pop("HF_HUB_OFFLINE", None)  # as a user's: with it, nothing showed that a start asked the hub
    have_platform()
    from vllm.v1.engine.core_client import EngineCoreClient

    @functools.wraps(EngineCoreClient.make_async_mp_client)
    def make(*_: Any, **__: Any) -> Any:
        return Core(by_rules(rules))

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    sys.argv = ["vllm", "serve", *arguments]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main(sys.argv[1:])
