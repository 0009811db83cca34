"""Continuous batching as bookkeeping: no model, the next token is made up."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from npu_gptoss.engine.kv_cache import BlockAllocator
from npu_gptoss.engine.request import Request, SamplingParams
from npu_gptoss.engine.scheduler import Chunk, Scheduler
from tests.refused import refused


def make_request(prompt_length: int, max_tokens: int = 1) -> Request:
    return Request(
        prompt_length=prompt_length,
        token_ids=list(range(prompt_length)),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=frozenset(),
        max_length=10**9,
    )


def make_scheduler(blocks: int = 100, block_size: int = 4, tokens: int = 64, size: int = 100) -> Scheduler:
    return Scheduler(BlockAllocator(blocks, block_size), max_batch_tokens=tokens, max_batch_size=size)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add(request)


def step(scheduler: Scheduler) -> list[Chunk]:
    """One step as the engine does it, with a made-up token for every request that samples."""
    chunks = scheduler.schedule()
    sampling = [chunk for chunk in chunks if chunk.samples]
    for chunk in chunks:
        assert chunk.end <= len(chunk.request.block_ids) * scheduler.allocator.block_size  # a slot for each new key
        chunk.request.num_computed = chunk.end
    for chunk in sampling:
        chunk.request.append(7)
        if chunk.request.finish_reason:
            scheduler.finish(chunk.request)
    return chunks


def spans(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]


def test_a_long_prompt_is_cut_into_chunks_and_samples_after_the_last_only() -> None:
    scheduler, request = make_scheduler(tokens=10), make_request(25, max_tokens=3)
    add(scheduler, request)
    steps = [step(scheduler) for _ in range(5)]
    assert [spans(chunks) for chunks in steps] == [[(0, 10)], [(10, 20)], [(20, 25)], [(25, 26)], [(26, 27)]]
    assert request.num_generated == 3


def test_a_prompt_joins_requests_that_are_decoding() -> None:
    scheduler = make_scheduler(tokens=10)
    first, second = make_request(4, max_tokens=9), make_request(15, max_tokens=9)
    add(scheduler, first)
    step(scheduler)
    add(scheduler, second)
    assert spans(step(scheduler)) == [(4, 5), (0, 9)]
    assert spans(step(scheduler)) == [(5, 6), (9, 15)]
    assert spans(step(scheduler)) == [(6, 7), (15, 16)]


def test_a_request_waits_until_its_whole_prompt_has_room() -> None:
    scheduler = make_scheduler(blocks=4, tokens=4)
    long, short = make_request(12, max_tokens=1), make_request(8, max_tokens=1)
    add(scheduler, long, short)
    assert spans(step(scheduler)) == [(0, 4)]
    assert len(scheduler.running) == 1  # a chunk of the second would fit, but not what follows
    step(scheduler)
    step(scheduler)
    assert spans(step(scheduler)) == [(0, 4)]


def test_a_later_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = make_scheduler(blocks=4)
    running, large, small = make_request(8, max_tokens=3), make_request(12), make_request(1)
    add(scheduler, running, large, small)
    order = []
    while scheduler.running or scheduler.waiting:
        order += [chunk.request for chunk in step(scheduler) if chunk.start == 0]
    assert order == [running, large, small]


def test_the_youngest_gives_way_and_keeps_its_tokens() -> None:
    scheduler = make_scheduler(blocks=2)
    old, young = make_request(4, max_tokens=4), make_request(3, max_tokens=4)
    add(scheduler, old, young)
    step(scheduler)
    assert [len(old.token_ids), len(young.token_ids)] == [5, 4]
    assert spans(step(scheduler)) == [(4, 5)]  # the old one needs a second block
    assert list(scheduler.waiting) == [young]
    assert (young.num_computed, young.block_ids, young.num_generated) == (0, [], 1)
    while scheduler.running:
        step(scheduler)
    assert spans(step(scheduler)) == [(0, 4)]  # prompt and first token anew
    assert old.num_generated == 4


def test_preempted_request_runs_before_new_requests() -> None:
    scheduler = make_scheduler(blocks=2)
    old, young, new = make_request(4, max_tokens=3), make_request(3, max_tokens=2), make_request(1)
    add(scheduler, old, young, new)
    step(scheduler)
    step(scheduler)
    assert list(scheduler.waiting) == [young, new]


@dataclass
class Load:
    blocks: int
    block_size: int
    tokens: int
    size: int


@pytest.mark.parametrize(
    "load", [Load(12, 4, 16, 8), Load(40, 1, 5, 100), Load(3, 16, 64, 3), Load(100, 4, 7, 2), Load(10, 5, 1, 4)]
)
def test_every_request_finishes_once_and_no_block_is_shared(load: Load) -> None:
    """Random requests into a cache that is far too small for them all; each alone fits."""
    rng = random.Random(0)
    scheduler = make_scheduler(load.blocks, load.block_size, load.tokens, load.size)
    requests = []
    for _ in range(60):
        length = rng.randint(1, scheduler.allocator.capacity)
        requests.append(make_request(length, max_tokens=rng.randint(1, scheduler.allocator.capacity - length + 1)))
    arrivals = list(requests)
    for _ in range(100_000):
        while arrivals and rng.random() < 0.3:
            scheduler.add(arrivals.pop(0))
        if not scheduler.running and not scheduler.waiting:
            if not arrivals:
                break
            continue
        before, preemptions = list(scheduler.running), scheduler.num_preemptions
        chunks = step(scheduler)
        if scheduler.num_preemptions > preemptions:  # blocks that became free are the older requests' to grow into
            assert {chunk.request for chunk in chunks} <= set(before)
        assert all(0 <= chunk.start < chunk.end for chunk in chunks)
        owned = [block for request in scheduler.running for block in request.block_ids]
        assert len(set(owned)) == len(owned)
        assert len(owned) + scheduler.allocator.num_free == load.blocks
        assert 1 <= sum(chunk.end - chunk.start for chunk in chunks) <= load.tokens
        assert len(chunks) <= load.size
        assert all(not request.block_ids and request.num_computed == 0 for request in scheduler.waiting)
    assert all(request.num_generated == request.params.max_tokens for request in requests)
    assert scheduler.allocator.num_free == load.blocks


@pytest.mark.parametrize("settings", [{"tokens": 0}, {"size": 0}, {"blocks": 0}, {"block_size": 0}])
def test_nothing_to_work_with_is_refused(settings: dict[str, int]) -> None:
    with refused("max_batch_tokens" if {"tokens", "size"} & settings.keys() else "num_blocks"):
        make_scheduler(**settings)
