"""A remembered launch is the launch that Triton would make, and what it would compile anew is compiled anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.buffer_utils", reason="needs vLLM 0.33")
pytest.importorskip("triton")

import torch
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from npu_gptoss.serving.compat.step_time.launches import Remembered

pytestmark = pytest.mark.serving


def kernel(first, second, count, nothing, SIZE: tl.constexpr, WIDE: tl.constexpr = False):
    pass


class Gpu:
    """What Triton asks of a driver where it launches."""

    device, stream = 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(what was compiled, …the arguments of the launch), instead of on a GPU."""
    seen: list[tuple[Any, ...]] = []

    def compiled(self: Any, key: str, *_: Any) -> Any:
        def run(*args: Any) -> None:
            seen.append((key, *args))

        made = SimpleNamespace(run=run, function="f", packed_metadata="m", launch_metadata=lambda *_: "told to hooks")
        self.device_caches[driver.active.get_current_device()][0][key] = made
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    before = driver.active if driver._active is not None else None
    driver.set_active(Gpu())
    yield seen
    driver._active = before


def same(launch: tuple[Any, ...]) -> list[Any]:
    """Without what only hooks get: the 8th to 10th."""
    return [id(value) if isinstance(value, torch.Tensor) else value for value in (*launch[:7], *launch[10:])]


def aligned(offset: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


CALLS = {
    "the same": lambda: (aligned(), aligned(), 8, None),
    "another tensor": lambda: (aligned(), aligned(), 8, None),
    "not aligned": lambda: (aligned(1), aligned(), 8, None),
    "another type": lambda: (aligned(), aligned(dtype=torch.int64), 8, None),
    "one": lambda: (aligned(), aligned(), 1, None),
    "no multiple of 16": lambda: (aligned(), aligned(), 33, None),
    "a bool": lambda: (aligned(), aligned(), True, None),
    "none": lambda: (aligned(), None, 8, None),
}


def test_every_launch_is_triton_s_own(launches):
    plain, remembered = JITFunction(kernel), Remembered(JITFunction(kernel))
    for turn in range(2):
        for name, arguments in CALLS.items():
            for grid, options in (((3,), {"SIZE": 4}), ((2, 5), {"SIZE": 8, "num_warps": 1})):
                given = arguments()
                plain[grid](*given, **options)
                remembered[grid](*given, **options)
                expected, found = launches[-2:]
                assert same(found) == same(expected), (turn, name)


def test_the_second_launch_does_not_go_through_triton_and_with_a_hook_it_does(launches, monkeypatch):
    ways: list[int] = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: ways.append(1) or run(self, *a, **k))
    remembered = Remembered(JITFunction(kernel))
    given = CALLS["the same"]()
    for _ in range(3):
        remembered[3,](*given, SIZE=4)
    assert len(ways) == 1
    Gpu.stream, before = 9, Gpu.stream
    remembered[3,](*given, SIZE=4)
    Gpu.stream = before
    assert launches[-1][4] == 9
    hook = print
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        remembered[3,](*given, SIZE=4)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(ways) == 2
    remembered[lambda _: (3,)](*given, SIZE=4)  # a grid that Triton works out of the arguments
    assert len(ways) == 3
    assert launches[-2][7] == "told to hooks"


def test_what_triton_interprets_is_left_to_it():
    interpreted = {(3,): lambda *args: args}
    assert Remembered(interpreted)[3,](1, 2) == (1, 2)


def test_the_kernels_of_a_step_are_replaced(patched):
    from vllm.v1.worker.gpu import block_table, input_batch
    from vllm.v1.worker.gpu.sample import gumbel

    for names in ((), ("launch-inputs", "launch-tables", "launch-draw")):
        with patched(*names):
            for module, name in (
                (input_batch, "_post_update_kernel"),
                (block_table, "_gather_block_tables_kernel"),
                (gumbel, "_gumbel_sample_kernel"),
            ):
                assert isinstance(vars(module)[name], Remembered) is bool(names)
