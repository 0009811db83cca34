"""Continuous batching with chunked prefill: the tokens of each request in the next step.

Requests in the order of their arrival. A running request owns blocks for all of its known tokens. When a growing
request finds no free block, the youngest running request gives up its blocks and waits at the head of the queue; it
keeps its tokens and recomputes their keys later, so nothing is lost but time. Every request fits the empty cache by
itself (the engine refuses others), so the oldest one always advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from npu_gptoss.engine.kv_cache import BlockAllocator
from npu_gptoss.engine.request import Request
from npu_gptoss.errors import InputError


@dataclass(frozen=True)
class Chunk:
    """A request's share of one step: its tokens from `start` up to, not including, `end`."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """True when the step ends with the logits that choose the request's next token."""
        return self.end == len(self.request.token_ids)


class Scheduler:
    def __init__(self, allocator: BlockAllocator, *, max_batch_tokens: int, max_batch_size: int) -> None:
        if max_batch_tokens < 1 or max_batch_size < 1:
            raise InputError(
                f"a step needs at least one token of one request, got max_batch_tokens={max_batch_tokens}, "
                f"max_batch_size={max_batch_size}",
                field="max_batch_tokens",
            )
        self.allocator = allocator
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_size = max_batch_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.arrived = False  # a request that no `schedule` has seen
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.arrived = True

    def schedule(self) -> list[Chunk]:
        """The next step: running requests first, then waiting ones, as far as tokens and blocks go."""
        self.arrived = False
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        index = 0
        while index < len(self.running):  # never more than the budget: each was admitted into what others had left
            request = self.running[index]
            if not self._grow_or_preempt(request):
                break  # it was the youngest itself and waits again
            budget -= self._take(request, budget, chunks)
            index += 1
        # one that was preempted is not admitted at once: it needs more blocks than its own leave, first in the queue
        while budget and self._admit():
            budget -= self._take(self.running[-1], budget, chunks)
        return chunks

    def reserve(self, requests: Sequence[Request]) -> bool:
        """Blocks for one token more than each request has, if there are that many; no request gives up blocks for
        it."""
        return all(self.allocator.grow(request.block_ids, len(request.token_ids) + 1) for request in requests)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.release(request.block_ids)

    def cancel(self, request: Request) -> None:
        """Forgets a request wherever it is; unknown and finished ones are left alone."""
        if request in self.running:
            self.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _take(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        end = min(len(request.token_ids), request.num_computed + budget)
        chunks.append(Chunk(request, request.num_computed, end))
        return end - request.num_computed

    def _admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        if not self.allocator.grow(self.waiting[0].block_ids, len(self.waiting[0].token_ids)):
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _grow_or_preempt(self, request: Request) -> bool:
        while not self.allocator.grow(request.block_ids, len(request.token_ids)):
            youngest = self.running.pop()
            self.allocator.release(youngest.block_ids)
            youngest.num_computed = 0
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is request:
                return False
        return True
