"""The recorder's calls to a device, on a stand-in that only records them: a CPU has no graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.graphs.recorder import Recorder
from tests.refused import refused


class Device:
    """A stand-in for torch.cuda or torch.npu. `events`: the calls, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.capturing = False
        self.CUDAGraph = self.NPUGraph = lambda: SimpleNamespace(replay=lambda: self.events.append("replay"))

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.events.append("main waits"))

    def Stream(self) -> SimpleNamespace:  # torch's name
        return SimpleNamespace(wait_stream=lambda other: self.events.append("aside waits"))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.events.append("back to the stream before")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.events.append("aside")
        yield
        self.events.append("main")

    @contextmanager
    def graph(self, graph: object, pool: str) -> Iterator[None]:
        assert pool == "pool"
        self.capturing = True
        yield
        self.capturing = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda asked: device)
    return device


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_work_is_warmed_up_aside_captured_and_run_once(device: Device, kind: str) -> None:
    """A capture's result is not computed yet, and the next recorded piece reads it."""
    results = []

    def work() -> int:
        device.events.append("capture" if device.capturing else "work")
        results.append(len(results))
        return results[-1]

    recorded = Recorder(SimpleNamespace(type=kind)).record(work)
    assert device.events == ["aside waits", "aside", "work", "work", "main", "main waits", "capture", "replay"]
    assert recorded.result == 2  # the capture's, into which replays write
    assert recorded.replay() == 2
    assert device.events[-2:] == ["replay", "replay"]


def test_a_step_that_asks_the_device_is_refused_with_the_way_out(device: Device) -> None:
    def work() -> None:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with refused("graphs"):
        Recorder(SimpleNamespace(type="npu")).record(work)  # of a GPU there is a generator, too: tests/engine/test_cuda
    assert device.events[-1] == "back to the stream before"


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_device_without_graphs_is_refused(kind: str) -> None:
    with refused("graphs"):
        Recorder(torch.device(kind))
