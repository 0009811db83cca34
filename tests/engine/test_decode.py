"""Replayed decode steps against steps without graphs; tests/graphs has the inputs of a step one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine import engine as engine_module
from npu_gptoss.engine.request import Request
from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.kernels import platform_override
from npu_gptoss.kernels.profiling import observing
from tests.checkpoints import new_checkpoint, write_random_checkpoint
from tests.engine.recording import RerunRecorder
from tests.oracle import random_prompts
from tests.refused import refused

LENGTHS = (1, 3, 15, 16, 17, 40, 129)
SIZES = (1, 2, 4, 8)
MODES = ("full", "piecewise")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, layers=2, window=20)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, 512)


@pytest.fixture(scope="module", autouse=True)
def recorder() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Recorder", RerunRecorder)
        yield


@pytest.fixture(scope="module")
def plain(directory: Path) -> Engine:
    return Engine(directory, dtype="float32", num_blocks=100)


@pytest.fixture(scope="module", params=MODES)
def graphed(request: pytest.FixtureRequest, directory: Path) -> Engine:
    return Engine(directory, dtype="float32", num_blocks=100, graphs=request.param, graph_sizes=SIZES)


def tokens(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    results = [result.token_ids for result in engine.generate(prompts, params)]
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
    return results


def count_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"launch": 0, "launch_next": 0}
    for name in counts:
        right = getattr(engine.graphs, name)

        def counted(requests: object, name: str = name, right: object = right) -> object:
            counts[name] += 1
            return right(requests)

        monkeypatch.setattr(engine.graphs, name, counted)
    return counts


@pytest.mark.parametrize("requests", range(1, len(LENGTHS) + 1))
def test_greedy_tokens_are_the_same_without_graphs(requests, plain, graphed, prompts) -> None:
    """Three requests run in the bucket of four, five to seven in the bucket of eight."""
    params = SamplingParams(max_tokens=24)
    assert tokens(graphed, prompts[:requests], params) == tokens(plain, prompts[:requests], params)


def test_steps_are_launched_ahead_and_loaded_by_the_host_once(graphed, prompts, monkeypatch) -> None:
    """Else the test above proves nothing about the inputs that the device advances."""
    counts = count_launches(graphed, monkeypatch)
    tokens(graphed, prompts[:3], SamplingParams(max_tokens=40))
    assert counts == {"launch": 1, "launch_next": 38}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_alone_are_computed_without_graphs(temperature, graphed, prompts, monkeypatch) -> None:
    """If the host loses a request's place in the cache, the request computes its last tokens again."""
    steps = []
    right = graphed._compute
    monkeypatch.setattr(graphed, "_compute", lambda chunks: (steps.append(len(chunks)), right(chunks)))
    graphed.generate(prompts[:3], [SamplingParams(max_tokens=n, temperature=temperature) for n in (5, 30, 12)])
    assert steps == [3]


def test_steps_are_launched_ahead_while_a_request_waits_for_blocks(directory, plain, prompts, monkeypatch) -> None:
    """Its blocks come free with the end of another, which no step is launched behind."""
    engine = Engine(directory, dtype="float32", num_blocks=5, graphs="full", graph_sizes=SIZES)
    counts = count_launches(engine, monkeypatch)
    pair, params = [prompts[5], prompts[5][::-1]], SamplingParams(max_tokens=30)  # 3 blocks each, 5 at the end
    assert tokens(engine, pair, params) == tokens(plain, pair, params)
    assert counts == {"launch": 2, "launch_next": 2 * 28}


def test_requests_that_end_at_different_times_hand_their_rows_on(plain, graphed, prompts) -> None:
    each = [SamplingParams(max_tokens=n) for n in (5, 30, 1, 17, 2, 24, 9)]
    want = [result.token_ids for result in plain.generate(prompts, each)]
    assert [result.token_ids for result in graphed.generate(prompts, each)] == want


def test_step_launched_after_a_stop_token_is_discarded(plain, graphed, prompts) -> None:
    free = tokens(plain, prompts, SamplingParams(max_tokens=20))
    stops = SamplingParams(max_tokens=20, stop_token_ids=(free[0][4], free[3][9]))
    want = tokens(plain, prompts, stops)
    assert {len(answer) for answer in want} != {20}
    assert tokens(graphed, prompts, stops) == want


def test_sampled_tokens_and_logprobs_are_the_same_without_graphs(plain, graphed, prompts) -> None:
    each = [
        SamplingParams(max_tokens=9, temperature=1.0, seed=3),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, logprobs=2),
        SamplingParams(max_tokens=9, temperature=0.7, top_k=5, seed=4),
    ]
    want, got = plain.generate(prompts[:4], each), graphed.generate(prompts[:4], each)
    assert [result.token_ids for result in got] == [result.token_ids for result in want]
    for mine, theirs in zip(got[2].logprobs, want[2].logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_greedy_requests_get_their_logprobs_from_graphs_too(plain, graphed, prompts) -> None:
    """The device chooses their tokens as well, but only the host can report on them."""
    params = SamplingParams(max_tokens=9, logprobs=2)
    want, got = plain.generate(prompts[:3], params), graphed.generate(prompts[:3], params)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert [entry.token_id for entry in mine.logprobs] == list(theirs.token_ids)
        assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
            [e.logprob for e in theirs.logprobs], abs=1e-4
        )


def test_step_launched_before_an_interrupt_is_discarded(plain, graphed, prompts) -> None:
    def interrupt(requests: Sequence[Request]) -> None:
        if requests[0].num_generated == 4:  # the step of the last token is under way
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphed.generate(prompts[:1], SamplingParams(max_tokens=5), on_step=interrupt)
    params = SamplingParams(max_tokens=5)
    assert tokens(graphed, prompts[1:3], params) == tokens(plain, prompts[1:3], params)


def test_arrival_or_cancel_between_early_steps_changes_no_tokens(plain, graphed, prompts, monkeypatch) -> None:
    """An engine that runs ahead for ever would never admit the second, and the third's end would leave a gap."""
    counts = count_launches(graphed, monkeypatch)
    first, third = (graphed.add_request(prompt, SamplingParams(max_tokens=30)) for prompt in prompts[:2])
    for _ in range(5):
        graphed.step()
    second = graphed.add_request(prompts[2], SamplingParams(max_tokens=3))
    graphed.step()
    graphed.step()
    assert second.num_generated == 1
    graphed.step()
    graphed.cancel(third)
    ended = []
    while graphed.busy:
        ended += graphed.step()
    assert ended == [second, first]
    want = tokens(plain, prompts[:3], SamplingParams(max_tokens=30))
    got = [graphed.result(request).token_ids for request in (first, third, second)]
    assert got == [want[0], want[1][: len(got[1])], want[2][:3]]
    assert len(got[1]) == 8
    assert counts["launch_next"] > 20


def test_a_cache_too_small_for_all_preempts_and_loses_nothing(directory, plain, prompts) -> None:
    tight = Engine(directory, dtype="float32", num_blocks=14, graphs="full", graph_sizes=SIZES)
    params = SamplingParams(max_tokens=60)
    assert tokens(tight, prompts, params) == tokens(plain, prompts, params)
    assert tight.scheduler.num_preemptions > 0


def test_a_preempted_request_does_not_report_its_answer_as_a_prompt(directory: Path, prompts: list[list[int]]) -> None:
    """It recomputes both in one chunk, and only graphs have computed the answer so far."""
    tight = Engine(directory, dtype="float32", num_blocks=14, graphs="full", graph_sizes=SIZES)
    results = tight.generate(prompts, SamplingParams(max_tokens=60, prompt_logprobs=0))
    assert tight.scheduler.num_preemptions > 0
    for result in results:
        assert result.prompt_logprobs[0] is None
        assert [entry.token_id for entry in result.prompt_logprobs[1:]] == list(result.prompt_token_ids[1:])


def test_graphs_reach_the_end_of_a_context_that_fills_no_whole_block(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, layers=1, max_positions=20)
    plain = Engine(tmp_path, dtype="float32", num_blocks=10)
    graphed = Engine(tmp_path, dtype="float32", num_blocks=10, graphs="full", graph_sizes=(2,))
    params = SamplingParams(max_tokens=100)
    pair = [[1, 2, 3], [4]]
    assert [len(answer) for answer in tokens(plain, pair, params)] == [17, 19]
    assert tokens(graphed, pair, params) == tokens(plain, pair, params)


def test_logits_of_a_prompt_of_one_token_do_not_come_from_a_graph(plain, graphed, prompts) -> None:
    """The step looks like decode, but its caller wants more than the next token."""
    assert len(prompts[0]) == 1
    assert torch.equal(graphed.logits(prompts[0]), plain.logits(prompts[0]))


def test_a_chunk_of_one_token_in_the_middle_of_a_prompt_is_no_decode_step(directory, plain, prompts) -> None:
    engine = Engine(directory, dtype="float32", num_blocks=100, max_batch_tokens=1, graphs="full", graph_sizes=SIZES)
    params = SamplingParams(max_tokens=4)
    assert tokens(engine, prompts[1:2], params) == tokens(plain, prompts[1:2], params)


def test_no_expert_is_read_for_padding_rows(graphed: Engine, prompts: list[list[int]]) -> None:
    """Each would cost its weights' bytes; results would be the same."""
    ids = []

    def observe(name: str, arguments: Mapping[str, object]) -> None:
        if name.startswith("moe.experts"):
            ids.append(arguments["topk_ids"].clone())

    with observing(observe):
        graphed.generate(prompts[:3], SamplingParams(max_tokens=3))
    decode_steps = [each for each in ids if len(each) == 4]
    assert len(decode_steps) == 2 * 2  # steps times layers
    for each in decode_steps:
        assert bool((each[:3] >= 0).all())
        assert bool((each[3:] == -1).all())


def test_each_new_block_is_sent_to_the_device_once(graphed, prompts, monkeypatch) -> None:
    sent = []
    right = DecodeState.set_blocks
    monkeypatch.setattr(DecodeState, "set_blocks", lambda self, entries: (sent.extend(entries), right(self, entries)))
    graphed.generate(prompts[:3], SamplingParams(max_tokens=40))
    assert len(sent) > 3
    assert len({(row, index) for row, index, _ in sent}) == len(sent)


def test_a_graph_reaches_as_far_as_the_longest_request(graphed: Engine) -> None:
    """Kernels cut longer lengths: no error, only forgotten keys."""
    assert graphed.graphs._metadata(graphed.graphs.state).max_seq_len >= graphed.max_length - 1


def test_a_batch_above_the_largest_graph_runs_without(directory, plain, prompts, monkeypatch) -> None:
    small = Engine(directory, dtype="float32", num_blocks=100, graphs="full", graph_sizes=(2,))
    counts = count_launches(small, monkeypatch)
    params = SamplingParams(max_tokens=6)
    assert tokens(small, prompts[:4], params) == tokens(plain, prompts[:4], params)
    assert counts == {"launch": 0, "launch_next": 0}
    assert tokens(small, prompts[:2], params) == tokens(plain, prompts[:2], params)
    assert counts["launch"] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])  # chosen by the device, and by the host
def test_logits_that_are_not_finite_stop_a_graph_too(directory: Path, temperature: float) -> None:
    engine = Engine(directory, dtype="float32", num_blocks=100, graphs="full", graph_sizes=(1,))
    first = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=temperature, seed=1))[0].token_ids[0]
    engine.model.embedding[first] = float("nan")  # the prompt is computed without graphs, and still finite
    with pytest.raises(engine_module.NonFiniteLogits):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5, temperature=temperature, seed=1))


# Settings


def test_graphs_on_a_cpu_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_gptoss.graphs.recorder import Recorder

    monkeypatch.setattr(engine_module, "Recorder", Recorder)
    with refused("graphs"):
        Engine(directory, num_blocks=4, graphs="full")


def test_a_mode_that_does_not_exist_is_refused(directory: Path) -> None:
    with refused("graphs"):
        Engine(directory, num_blocks=4, graphs="partial")


@pytest.mark.parametrize(
    ("device", "dtype", "features"),
    [("cuda", torch.float32, {"triton"}), ("cuda", torch.bfloat16, set()), ("npu", torch.bfloat16, {"triton"})],
)
def test_steps_of_plain_torch_operations_are_not_captured_by_default(device, dtype, features) -> None:
    """They ask the device for lengths, which a capture refuses: the engine would not start."""
    kinds = {"cuda": "cuda", "npu": "ascend"}
    engine = SimpleNamespace(device=SimpleNamespace(type=device), model=SimpleNamespace(dtype=dtype))
    with platform_override(kinds[device], frozenset(features)):
        assert Engine._capture(engine, "auto", None, False) is None
