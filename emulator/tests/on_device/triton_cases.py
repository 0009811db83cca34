"""Triton-Ascend's kernels on the emulated device: Huawei's compiler checks each, this CPU runs the lowered code."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch_npu  # noqa: F401
import triton
import triton.language as tl
from ascend_emulator import trace
from ascend_emulator.errors import EmulatorError
from tools import captured

npu = torch.npu


@triton.jit
def moved(source, places, out, count, SIZE: tl.constexpr):
    """`out[i] = 2 * source[places[i]]`, rows of SIZE; a negative place leaves its row."""
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        place = tl.load(places + row)
        if place >= 0:
            column = tl.arange(0, SIZE)
            tl.store(out + row * SIZE + column, tl.load(source + place * SIZE + column) * 2)


def rows(size: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.arange(4 * size, dtype=torch.float32).view(4, size)
    return source.npu(), torch.tensor([3, -1, 0], dtype=torch.int32).npu(), torch.full((3, size), -5.0).npu()


def expected(source: torch.Tensor, places: list[int], before: float) -> list[list[float]]:
    return [[before] * source.shape[1] if p < 0 else (2 * source.cpu()[p]).tolist() for p in places]


def refused(words: str, launch: Callable[[], None]) -> None:
    said = "nothing was refused"
    try:
        launch()
    except EmulatorError as error:
        said = str(error)
    assert words in said, said


def case_a_launch_writes_the_kernels_result() -> None:
    source, places, out = rows()
    moved[(2,)](source, places, out, 3, SIZE=24)
    assert out.tolist() == expected(source, [3, -1, 0], -5)


def case_a_grid_may_be_a_function_and_a_view_has_an_offset() -> None:
    source, places, out = rows()
    moved[lambda constants: (constants["count"],)](source[1:], places[2:], out[1:], 1, SIZE=24)
    assert out.tolist() == expected(source, [-1, 1, -1], -5)


def case_a_captured_launch_runs_at_the_replay_and_reads_the_device_then() -> None:
    source, places, out = rows()
    graph, _ = captured(lambda: moved[(1,)](source, places, out, 3, SIZE=24))
    assert (out == -5).all(), "it ran while it was captured"
    places.copy_(torch.tensor([-1, 2, 2], dtype=torch.int32))
    graph.replay()
    assert out.tolist() == expected(source, [-1, 2, 2], -5)


def case_a_launch_writes_before_the_next_operator_of_the_stream() -> None:
    source, places, out = rows()
    with npu.stream(npu.Stream()):
        source.add_(1)
        moved[(1,)](source, places, out, 3, SIZE=24)
        after = out + 1
    npu.synchronize()
    assert after.tolist() == [[v + 1 for v in row] for row in expected(source, [3, -1, 0], -5)]


def case_a_tile_that_the_compiler_refuses_is_refused() -> None:
    source, places, out = rows(60000)
    launch = moved[(1,)]
    refused("requires 1920000 bits while 1572864 bits", lambda: launch(source, places, out, 3, SIZE=60000))


def case_a_launch_without_a_tensor_of_the_device_is_refused() -> None:
    source, places, out = (tensor.cpu() for tensor in rows())
    refused("none of its tensors is on the device", lambda: moved[(1,)](source, places, out, 3, SIZE=24))


def case_a_trace_counts_each_touched_byte_once() -> None:
    """Rows of 96 bytes and three row numbers: only parts of `source`, and not the kept row of `out`."""
    source, places, out = rows()
    told = []

    def operator(name: str, phase: str, *_: object, moved: trace.Traffic | None, **__: object) -> None:
        if name == "triton::moved" and phase != "capture":
            told.append(moved)

    with mock.patch.object(trace, "ENABLED", True), mock.patch.object(trace, "operator", operator):
        moved[(2,)](source, places, out, 3, SIZE=24)
        graph, _ = captured(lambda: moved[(1,)](source, places, out, 3, SIZE=24))
        places.copy_(torch.tensor([2, 2, 2], dtype=torch.int32))
        graph.replay()
        npu.synchronize()
    assert told == [trace.Traffic(2 * 96 + 12, 2 * 96), trace.Traffic(1 * 96 + 12, 3 * 96)], told


def case_the_card_has_as_many_cores_as_a_910b3() -> None:
    from triton.runtime import driver

    assert driver.active.utils.get_device_properties(0)["num_vectorcore"] == 40
