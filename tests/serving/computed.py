"""The offline engine in the place of vLLM 0.33's engine core, with vLLM's own grammars: a model's answers on a CPU.

`tests/serving/scripted.py --engine` serves it. vLLM 0.33 has no build for CPUs that computes, so that its HTTP side
would have no model behind it. Penalties, biases and lists of tokens are not applied.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_gptoss.engine import Engine, Request, SamplingParams, TokenLogprobs
from npu_gptoss.harmony.library import load_encoding
from tests.serving.scripted import Core as Scripted
from tests.serving.scripted import failed

TEXT_TOKENS = 199998  # of the vocabulary; control tokens follow


@dataclass(eq=False)
class _Work:
    """A request of AsyncLLM's and the engine's. sent: how many of its tokens are."""

    asked: Any
    grammar: Any = None
    request: Request | None = None
    sent: int = 0


@dataclass
class _Held:
    """The requests that a grammar binds, and the engine's hook for it.

    blanks: tokens of white space. So small a model loses itself in them where a grammar allows any number: two in
    succession are not chosen. vLLM's option against it does not apply to the grammars of whole turns.
    """

    blanks: torch.Tensor
    works: dict[Request, _Work] = field(default_factory=dict)

    def mask(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        import xgrammar

        for row, request in enumerate(requests):
            work = self.works.get(request)
            if work is not None and not work.grammar.is_terminated():
                bits = torch.full((1, (logits.shape[-1] + 31) // 32), -1, dtype=torch.int32)
                work.grammar.fill_bitmask(bits, 0)
                xgrammar.apply_token_bitmask_inplace(logits[row : row + 1], bits)
                others = logits[row].index_fill(0, self.blanks, -torch.inf)
                if request.token_ids[-1] in self.blanks and others.isfinite().any():
                    logits[row] = others

    def accept(self, requests: Sequence[Request]) -> None:
        for request in requests:
            work = self.works.get(request)
            if work is not None and not work.grammar.is_terminated():
                work.grammar.accept_tokens(work.asked.request_id, request.token_ids[-1:])


class _Engine(Engine):
    """The offline engine, its choices held to grammars."""

    held: _Held

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        self.held.mask(requests, logits)
        super()._sample(requests, logits)
        self.held.accept(requests)


class Core(Scripted):
    """The interface that AsyncLLM expects of its engine core; a thread computes."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        super().__init__(reply=lambda _: "")
        self.grammars = StructuredOutputManager(vllm_config)
        self.engine = _Engine(vllm_config.model_config.model, dtype="float32")
        library = load_encoding()
        blank = [token for token in range(TEXT_TOKENS) if library.decode([token]).isspace()]
        self.engine.held = _Held(torch.tensor(blank))
        self.arrived: queue.Queue[_Work | None] = queue.Queue()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    async def add_request_async(self, request: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.arrived.put(_Work(request))

    def shutdown(self, timeout: float | None = None) -> None:
        self.arrived.put(None)

    def _run(self) -> None:
        works: list[_Work] = []
        while True:
            while not works or not self.arrived.empty():
                work = self.arrived.get()
                if work is None:
                    return
                try:
                    self._begin(work)
                    works.append(work)
                except Exception as error:
                    print(f"a request cannot be computed: {error!r}", flush=True)
                    self._tell(failed(work.asked.request_id))
            for work in works:
                if work.asked.request_id in self.aborted:
                    self.engine.cancel(work.request)
            self.engine.step()
            for work in works:
                self._send(work)
            works = [work for work in works if work.request.finish_reason is None]

    def _begin(self, work: _Work) -> None:
        asked = work.asked.sampling_params
        params = SamplingParams(
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k),
            seed=asked.seed,
            logprobs=asked.logprobs,
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            ignore_eos=asked.ignore_eos,
        )
        if asked.structured_outputs is not None:
            from vllm.v1.request import Request as OfVllm

            held = OfVllm.from_engine_core_request(work.asked, None)
            self.grammars.grammar_init(held)
            work.grammar = held.structured_output_request._grammar.result()
        work.request = self.engine.add_request(work.asked.prompt_token_ids, params)
        if work.grammar is not None:
            self.engine.held.works[work.request] = work

    def _send(self, work: _Work) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        request = work.request
        new = request.token_ids[request.prompt_length + work.sent :]
        finish = request.finish_reason
        if finish is not None:
            self.engine.held.works.pop(request, None)
        if finish == "cancelled" or not (new or finish):
            return
        logprobs = None if request.params.logprobs is None else _logprobs(request.logprobs[work.sent :])
        work.sent += len(new)
        asked = work.asked.sampling_params
        stopped = finish == "stop" and new[-1] in (asked.stop_token_ids or ())
        reason = {None: None, "stop": FinishReason.STOP}.get(finish, FinishReason.LENGTH)
        self._tell(
            EngineCoreOutput(
                work.asked.request_id,
                new,
                new_logprobs=logprobs,
                finish_reason=reason,
                stop_reason=new[-1] if stopped else None,
            )
        )

    def _tell(self, output: Any) -> None:
        self.loop.call_soon_threadsafe(self._put, output)


def _logprobs(entries: Sequence[TokenLogprobs]) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    rows = [[(entry.token_id, entry.logprob), *entry.top] for entry in entries]
    ids = np.array([[token for token, _ in row] for row in rows])
    values = np.array([[value for _, value in row] for row in rows], dtype=np.float32)
    ranks = [1 + sum(value > entry.logprob for _, value in entry.top) for entry in entries]
    return LogprobsLists(ids, values, np.array(ranks))
