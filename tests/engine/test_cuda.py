"""The engine on a GPU: real graphs against launches one by one, and the mistakes that only a real graph makes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine import engine as engine_module
from npu_gptoss.graphs.recorder import Recorder
from tests.checkpoints import new_checkpoint
from tests.engine.recording import RerunRecorder
from tests.engine.test_decode import MODES, tokens
from tests.oracle import random_prompts
from tests.refused import refused
from tests.serving.cuda.answers import listen_to_triton

pytestmark = pytest.mark.cuda

SIZES = (1, 2, 4, 8)
SHAPE = {"layers": 4, "hidden": 256, "intermediate": 256, "heads": 8, "kv_heads": 2, "window": 20}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, mxfp4=True, **SHAPE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts((5, 17, 40, 129, 3, 16, 64, 100), 512)


def engine(directory: Path, graphs: str) -> Engine:
    return Engine(directory, device="cuda", num_blocks=200, graphs=graphs, graph_sizes=SIZES)


def launched_one_by_one(directory: Path, graphs: str) -> Engine:
    """The same steps with the same kernels, in the same buckets, but none of it captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Recorder", RerunRecorder)
        return engine(directory, graphs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requests", range(1, 9))
def test_replayed_tokens_equal_launched_tokens_bit_for_bit(mode, requests, directory, prompts) -> None:
    params = SamplingParams(max_tokens=40)
    want = tokens(launched_one_by_one(directory, mode), prompts[:requests], params)
    assert tokens(engine(directory, mode), prompts[:requests], params) == want


@pytest.mark.parametrize("requests", [1, 2, 4, 8])
def test_a_whole_bucket_chooses_the_tokens_of_steps_without_graphs(requests, directory, prompts) -> None:
    """Piecewise, where attention splits its keys by the host's lengths in both."""
    params = SamplingParams(max_tokens=40)
    want = tokens(engine(directory, "none"), prompts[:requests], params)
    assert tokens(engine(directory, "piecewise"), prompts[:requests], params) == want


def test_kernels_that_cannot_be_captured_are_named_as_the_reason(directory: Path) -> None:
    """In fp32 the experts run on plain torch ops, which ask the device how many rows each has."""
    stream = torch.cuda.current_stream()
    with refused("graphs"):
        Engine(directory, device="cuda", dtype="float32", num_blocks=200, graphs="full", graph_sizes=SIZES)
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == stream
    assert torch.randn(8, device="cuda").isfinite().all(), "the process goes on"
    assert Engine(directory, device="cuda", dtype="float32", num_blocks=20).graphs is None


@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_change_nothing(mode: str, directory: Path, prompts: list[list[int]]) -> None:
    """Three requests in the bucket of four, after other requests ran in it."""
    graphed = engine(directory, mode)
    params = SamplingParams(max_tokens=40)
    first = tokens(graphed, prompts[:3], params)
    tokens(graphed, prompts[4:], SamplingParams(max_tokens=5))
    assert tokens(graphed, prompts[:3], params) == first


def test_work_that_asks_the_device_cannot_be_captured() -> None:
    """Work outside of a capture must not be skipped without an error."""
    values = torch.ones(4, device="cuda")
    with refused("graphs"):
        Recorder(values.device).record(lambda: values + float(values.sum()))
    torch.cuda.synchronize()


def test_a_result_is_overwritten_at_its_address_by_every_replay() -> None:
    source = torch.ones(4, device="cuda")
    recorded = Recorder(source.device).record(lambda: source * 2)
    assert recorded.replay().tolist() == [2.0] * 4
    source.fill_(5)
    assert recorded.result.tolist() == [2.0] * 4
    assert recorded.replay().tolist() == [10.0] * 4


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The programs of this package that Triton compiles meanwhile, as in a new process."""
    import triton

    for kernel in gc.get_objects():
        if issubclass(type(kernel), triton.JITFunction):
            kernel.device_caches.clear()
    before = triton.knobs.runtime.jit_post_compile_hook
    yield listen_to_triton()
    triton.knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("warm", [True, False])
def test_no_request_waits_for_a_program_after_the_warm_up(warm: bool, directory: Path, compiled: list[str]) -> None:
    served = Engine(directory, device="cuda", num_blocks=400, max_batch_tokens=512, max_batch_size=8, graph_sizes=SIZES)
    if warm:
        served.warm_up()
    compiled.clear()
    for lengths in ((1,), (2, 3), (5, 17, 1), (129, 511, 64), (800,), (1, 48, 49, 50, 300, 7, 255, 33)):
        served.generate(random_prompts(lengths, 512), SamplingParams(max_tokens=9))
    assert (compiled == []) == warm, compiled
