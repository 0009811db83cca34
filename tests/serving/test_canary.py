"""What the canary takes for a fault, and what for rounding: another batch size chooses other kernels."""

from __future__ import annotations

from types import SimpleNamespace as Having
from typing import Any, NamedTuple

import pytest
import torch

from npu_gptoss.serving.canary import FULL, NONE, Canary, Findings, Prompt, Watch
from npu_gptoss.serving.releases import vllm_0_33

PROMPTS = [Prompt(number, 5, 8, ([number],), 1000) for number in range(4)]
BATCH, OTHER = [(prompt, 1) for prompt in PROMPTS], [(prompt, 1) for prompt in PROMPTS[1::-1]]


class Stepping(Canary):
    """Hidden states are one number a request: its prompt's, `noise` more in a small batch, `fault` more in replays."""

    def __init__(self, noise: float, fault: float) -> None:
        self.noise, self.fault, self.watch = noise, fault, Watch(mode=FULL, size=4)

    def _step(self, batch: Any, *, eager: bool = True, **more: Any) -> torch.Tensor:
        moved = self.noise * (len(batch) < len(PROMPTS)) + (0.0 if eager else self.fault)
        return torch.tensor([[10.0 * prompt.number + moved] for prompt, _ in batch])

    def _equal(self, right: torch.Tensor, replayed: torch.Tensor) -> bool:
        return torch.equal(right, replayed)  # on the only rank

    def _differences(self, want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        return (got - want).abs()[:, 0]


@pytest.mark.parametrize(
    ("noise", "fault", "wrong", "unjudged"),
    [
        (0.0, 0.0, False, 0),
        (0.0, 0.2, False, 0),  # rounding of graphs that choose other kernels
        (0.0, 0.3, True, 0),
        (0.2, 0.3, False, 0),  # another batch size alone moves logits by 0.2
        (0.2, 0.65, True, 0),
        (0.3, 0.65, False, 1),  # a wrong context moves them by 0.7 at least: no longer told from rounding
        (0.3, float("nan"), True, 1),
    ],
)
def test_a_difference_is_a_fault_only_beyond_what_rounding_does(noise, fault, wrong, unjudged) -> None:
    found = Findings(context=0.7)
    Stepping(noise, fault)._compare(found, FULL, 4, BATCH, OTHER)
    assert (FULL in found.wrong, found.unjudged) == (wrong, unjudged)
    assert found.replayed == 1


def test_noise_is_that_of_the_same_requests_in_both_batches() -> None:
    """Requests stand in another order there, and one has other rows: it is another step."""
    canary = Stepping(0.2, 0.0)
    other = [(PROMPTS[3], 2), *OTHER]
    want = {id(BATCH): canary._step(BATCH), id(other): canary._step(other)}
    assert canary._noise(BATCH, other, want) == pytest.approx(0.2)


def test_no_third_step_begins_before_the_first_has_ended() -> None:
    """The GPU reads lengths and tokens from two buffers of the host. On two H200s the steps of a canary that ran ahead
    read those of later ones: an illegal address, or logits that differ by 1.3."""
    under_way: list[int] = []

    def execute(number: int) -> None:
        worker.model_runner.execute_model_state = Having(
            input_batch=Having(req_ids=[], logits_indices=[0]), hidden_states=torch.zeros(1, 2)
        )
        under_way.append(number)

    def sample(number: int) -> Having:
        return Having(get_output=lambda: under_way.remove(number))

    worker, watch = Having(model_runner=Having()), Watch()
    for number in range(6):
        execute(number)
        assert len(under_way) <= 2
        worker.sample_tokens = lambda grammar, number=number: sample(number)
        vllm_0_33.last_rows(worker, watch)


class Graph(NamedTuple):
    cg_mode: Any
    num_tokens: int


def test_a_full_graph_that_is_wrong_stays_in_no_table_of_0_33() -> None:
    """vLLM 0.33 would choose or replay it again. A step without a graph is one for the canary alone."""
    modes = pytest.importorskip("vllm.config").CUDAGraphMode
    whole, part, eager = Graph(modes.FULL, 8), Graph(modes.PIECEWISE, 16), Graph(modes.NONE, 5)
    manager = Having(_graphs_captured=True, graphs={whole: 1, part: 2}, _candidates={5: [whole, part]})
    manager._capture_descs = {modes.FULL: [whole], modes.PIECEWISE: [part, Graph(modes.PIECEWISE, 8)]}
    manager.dispatch = right = lambda rows: manager._candidates[rows][0] if manager._graphs_captured else eager
    runner, watch = Having(cudagraph_manager=manager), Watch()
    with vllm_0_33.watching(runner, watch):
        assert (manager.dispatch(5), watch.mode, watch.size) == (whole, FULL, 8)
        watch.eager = True
        assert (manager.dispatch(5), watch.mode, watch.size) == (eager, NONE, 5)
        assert manager._graphs_captured
    assert manager.dispatch is right
    assert vllm_0_33.captured(runner) == {"FULL": [8], "PIECEWISE": [8, 16]}
    vllm_0_33.leave_full_graphs(Having(model_runner=runner))
    assert vllm_0_33.captured(runner) == {"PIECEWISE": [8, 16]}
    assert manager.dispatch(5) is part
    assert manager.graphs == {part: 2}
    manager._graphs_captured = False
    assert vllm_0_33.captured(runner) == {}
