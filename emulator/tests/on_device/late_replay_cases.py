"""The defect late-replays: a replay begins when the host waits for its end, directly or by way of other streams."""

from __future__ import annotations

import torch
from graph_cases import External
from tools import refused

npu = torch.npu


def read_behind(it: External, count: int) -> list[float]:
    """The result as vLLM's thread of results reads it, behind `count` streams that wait for each other."""
    host, event, before = torch.empty(2).pin_memory(), npu.Event(), npu.current_stream()
    for _ in range(count):
        behind = npu.Stream()
        behind.wait_stream(before)
        before = behind
    with npu.stream(before):
        host.copy_(it.after, non_blocking=True)
        event.record()
    event.synchronize()
    return host.tolist()


def case_the_host_waits_for_another_streams_copy_of_the_result() -> None:
    for count in (0, 1, 2):
        it = External()
        it.graph.replay()
        it.update(2)
        assert read_behind(it, count) == [30, 60], count


def case_a_replay_that_nobody_waits_for_is_overtaken() -> None:
    it, other, early = External(), npu.Stream(), npu.Event()
    early.record()
    it.graph.replay()
    it.update(2)
    early.synchronize()
    early.record(other)
    with npu.stream(other):
        it.x.add_(100)
    other.synchronize()
    early.synchronize()
    assert read_behind(it, 1) == [3030, 3060]


def case_R86_the_second_update_overtakes_the_first_replay() -> None:
    it = External()
    for alpha in (2, 5):
        it.graph.replay()
        it.update(alpha)
    with refused("R86", "which nobody records"):
        read_behind(it, 1)


def case_a_replay_behind_one_that_is_awaited_may_be_late() -> None:
    it, other, event = External(), npu.Stream(), npu.Event()
    it.graph.replay()
    it.update(2)
    event.record()
    event.synchronize()
    it.graph.replay()
    event.record()
    it.update(2)
    with npu.stream(other):
        it.x.add_(100)
    other.synchronize()
    assert read_behind(it, 1) == [3030, 3060]
