"""The sampler's shortcut and skipped metadata give the full results, and are used only where allowed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.sample.sampler", reason="needs vLLM 0.33")

import numpy as np
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from npu_gptoss import dense
from npu_gptoss.dense import Shortlist
from npu_gptoss.serving.cuda import state
from npu_gptoss.serving.cuda.model import GptOssForCausalLM
from npu_gptoss.serving.cuda.state import PlainSampler, StepState
from tests.triton import TRITON_HERE

VOCABULARY, SLOTS = 5000, 16
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's way without pinned memory, where there is none."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.is_uva_available", lambda: False)


class Step:
    """Requests in slots of vLLM's tables, each with a row of logits, and both samplers over the same tables."""

    def __init__(self, *wanted: dict[str, Any], slots: Sequence[int] = (5, 2, 7, 3, 11, 0, 1, 15, 4)) -> None:
        self.states = RequestState(SLOTS, 64, 64, 0, VOCABULARY, torch.device("cpu"))
        config = Having(reasoning_config=None)
        self.long = Sampler(config, SLOTS, VOCABULARY, torch.device("cpu"), self.states)
        self.short = PlainSampler.of(self.long)
        self.slots = list(slots[: len(wanted)])
        for slot, options in zip(self.slots, wanted, strict=True):
            self.states.free_indices = [slot]
            self.states.add_request(f"r{slot}", 4, [1, 2, 3, 4], 4, 9)
            self.short.add_request(slot, SamplingParams(**options))
        self.states.apply_staged_writes()
        self.short.apply_staged_writes()
        self.batch = InputBatch.make_dummy(len(wanted), len(wanted), InputBuffers(SLOTS, 64, torch.device("cpu")))
        self.batch.idx_mapping_np = np.array(self.slots, dtype=np.intp)
        self.batch.idx_mapping = self.batch.expanded_idx_mapping = torch.tensor(self.slots)
        self.batch.positions.copy_(torch.arange(4, 4 + len(wanted)))
        self.batch.seq_lens.fill_(5)
        torch.manual_seed(0)
        self.logits = torch.randn(len(wanted), VOCABULARY).bfloat16()

    def both(self) -> tuple[Any, Any]:
        return self.long(self.logits.clone(), self.batch), self.short(self.logits.clone(), self.batch)


def tokens(output: Any) -> tuple[list[Any], ...]:
    return tuple(x.tolist() for x in (output.sampled_token_ids, output.num_sampled, output.num_rejected))


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each step that goes through vLLM's own."""
    taken: list[int] = []
    call = Sampler.__call__

    def counted(self: Any, *args: Any) -> Any:
        if isinstance(self, PlainSampler):
            taken.append(1)
        return call(self, *args)

    monkeypatch.setattr(Sampler, "__call__", counted)
    return taken


class Head:
    """Stands in for the model: its weights draw from hidden states, whose logits `Step` gives to vLLM's sampler."""

    def __init__(self, rows: int = 8) -> None:
        torch.manual_seed(1)
        self.lm_head = torch.randn(VOCABULARY, 32).bfloat16()
        self.shortlist, self.token_rows, self.config = Shortlist.of(self.lm_head), rows, Having(vocab_size=VOCABULARY)
        self.gptoss, self.tokens_only, self.undecided, self.taken = self, False, None, 0

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return dense.logits(hidden, self.lm_head, kernel="small_ops")

    def token(self, hidden: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        self.taken += 1
        return dense.token(hidden, self.lm_head, self.shortlist, noise, kernel="small_ops")

    compute_logits = GptOssForCausalLM.compute_logits


def by_tokens(step: Step, head: Head) -> tuple[Any, Any]:
    """What vLLM's sampler draws from the logits, and ours from what the model gives after it was told of the step."""
    sampler = PlainSampler.of(step.long, head)
    hidden = torch.randn(len(step.slots), 32).bfloat16()
    sampler.foresee(step.batch)
    step.batch.logits_indices, step.batch.num_draft_tokens = torch.arange(len(hidden)), 0
    runner = Having(batch_sharder=None, model=head, sampler=sampler, rejection_sampler=None)
    sampled, *_ = GPUModelRunner.sample(runner, hidden, step.batch, None)
    return step.long(head.head(hidden), step.batch), sampled


MANY = (GREEDY,) * state.GREEDY_ROWS


@TRITON_HERE
@pytest.mark.parametrize("wanted", [(GREEDY,), (GREEDY, DRAWN, GREEDY), (DRAWN, DRAWN | {"seed": 4}), MANY])
def test_tokens_taken_without_logits_are_the_full_samplers(wanted):
    step, head = Step(*wanted), Head()
    for taken in range(1, 4):
        long, short = by_tokens(step, head)
        assert tokens(short) == tokens(long)
        assert head.taken == taken
        step.batch.positions += 1


@TRITON_HERE
@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ((GREEDY,), {"has_structured_output_reqs": True}),
        ((GREEDY,), {"has_prefill": True}),
        ((GREEDY, {"temperature": 0.7}), {}),
        ((GREEDY, {"temperature": 0.0, "presence_penalty": 1.0}), {}),
        ((GREEDY, {"temperature": 0.0, "logprobs": 2}), {}),
        ((GREEDY, {"temperature": 0.0, "logit_bias": {3: 5.0}}), {}),
        ((*MANY, GREEDY), {}),
    ],
)
def test_a_step_that_needs_its_logits_gets_them(wanted, changes):
    step, head = Step(*wanted), Head()
    for name, value in changes.items():
        setattr(step.batch, name, value)
    long, short = by_tokens(step, head)
    assert tokens(short) == tokens(long)
    assert not head.taken


@TRITON_HERE
def test_noise_of_64_bits_is_drawn_by_vllms_sampler(monkeypatch):
    """Ours has 32: a seed would draw other tokens than without the shortcut. A greedy step has no noise."""
    asked: list[bool] = []
    monkeypatch.setattr(state, "gumbel_sample", lambda *_, use_fp64, **__: asked.append(use_fp64) or torch.zeros(1))
    for options, taken in ((DRAWN, 0), (GREEDY, 1)):
        step, head = Step(options), Head()
        step.long.use_fp64_gumbel = True
        by_tokens(step, head)
        assert head.taken == taken
    assert asked == [True]


@TRITON_HERE
def test_a_damaged_row_taken_without_logits_gives_no_token_of_minus_1():
    step, head = Step(GREEDY), Head()
    sampler = PlainSampler.of(step.long, head)
    sampler.foresee(step.batch)
    assert sampler.take(torch.full((1, 32), float("nan")).bfloat16(), *[None] * 4).tolist() == [0]


@pytest.mark.parametrize("name", ["compute_nans", "return_sampling_mask", "trace_replay_state"])
def test_a_sampler_that_reports_more_than_tokens_takes_no_shortcut(name):
    step = Step(GREEDY)
    assert step.short.is_plain(step.batch)
    step.short.add_request(step.slots[0], SamplingParams(**GREEDY))
    setattr(step.short, name, True)
    assert not step.short.is_plain(step.batch)


def test_hidden_states_are_given_for_one_step_only():
    head = Head()
    head.tokens_only = True
    hidden = torch.randn(2, 32).bfloat16()
    assert head.compute_logits(hidden) is hidden
    assert head.compute_logits(hidden).shape == (2, VOCABULARY)


@TRITON_HERE
def test_a_step_other_than_foreseen_is_sampled_from_its_logits():
    step, head = Step(GREEDY, GREEDY), Head()
    sampler, hidden = PlainSampler.of(step.long, head), torch.randn(2, 32).bfloat16()
    sampler.foresee(step.batch)
    sampler.add_request(step.slots[1], SamplingParams(temperature=0.0, logprobs=2))
    sampler.apply_staged_writes()
    short = sampler(head.compute_logits(hidden), step.batch)
    assert tokens(short)[0] == head.head(hidden).argmax(-1, keepdim=True).tolist()
    assert short.logprobs_tensors is not None


@TRITON_HERE
@pytest.mark.parametrize("wanted", [(GREEDY,), (GREEDY, DRAWN, GREEDY), (DRAWN, DRAWN | {"seed": 4}), MANY])
def test_the_shortcut_draws_the_full_samplers_tokens(long_ways, wanted):
    step = Step(*wanted)
    for _ in range(2):
        long, short = step.both()
        assert tokens(short) == tokens(long)
        assert short.num_sampled.dtype == long.num_sampled.dtype
        assert short.num_rejected.dtype == long.num_rejected.dtype
        assert short.sampled_token_ids.dtype == long.sampled_token_ids.dtype
        assert short.logprobs_tensors is short.num_nans is short.sampling_mask_tensors is None
        step.logits = step.logits.roll(7, dims=1)
    assert not long_ways
    step.batch.positions += 1
    step.logits = torch.randn(len(wanted), VOCABULARY).bfloat16()
    assert tokens(step.short(step.logits, step.batch)) == tokens(step.long(step.logits, step.batch))


@TRITON_HERE
@pytest.mark.parametrize("wanted", [(GREEDY,), MANY, (DRAWN, GREEDY)])
def test_a_grammars_tokens_are_drawn_by_the_shortcut_too(long_ways, wanted):
    """vLLM writes minus infinity over forbidden tokens before it samples; that is no damaged row."""
    step = Step(*wanted)
    allowed = [17, 4203, 900]
    masked = torch.full_like(step.logits[0], float("-inf"))
    masked[allowed] = step.logits[0, allowed]
    step.logits[0] = masked
    long, short = step.both()
    assert tokens(short) == tokens(long)
    assert int(short.sampled_token_ids[0]) in allowed
    assert not long_ways


@TRITON_HERE
def test_only_steps_of_greedy_requests_alone_are_picked_by_our_kernels(monkeypatch):
    """A token drawn at a temperature of 0 would be equal at every seed."""
    monkeypatch.setattr(state.dense, "greedy", lambda logits: torch.full((len(logits),), -1))
    step = Step(*MANY, GREEDY)
    assert step.short(step.logits, step.batch).sampled_token_ids.unique().tolist() == [0], "ours, -1 as a token"
    step.short.add_request(step.slots[4], SamplingParams(**DRAWN))  # in the place of one that ended
    step.short.apply_staged_writes()
    long, short = step.both()
    assert tokens(short) == tokens(long)
    few = Step(*MANY[1:])
    assert tokens(few.both()[1]) == tokens(few.both()[0])


@TRITON_HERE
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "seed": 3, "top_k": 5},
        {"temperature": 1.0, "seed": 3, "top_p": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {7: 100.0}},
        {"temperature": 0.0, "stop_token_ids": [7], "min_tokens": 3},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_a_request_with_other_options_ends_the_batchs_shortcut(long_ways, options, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda *_, **__: (torch.tensor([11, 12]), None))
    monkeypatch.setattr("vllm.v1.worker.gpu.sample.sampler.compute_topk_scores", lambda *_, **__: None)
    step = Step(GREEDY, GREEDY)
    step.short(step.logits, step.batch)
    assert not long_ways
    step.short.add_request(step.slots[1], SamplingParams(**options))  # in the place of one that ended
    step.short.apply_staged_writes()
    assert step.short(step.logits, step.batch).sampled_token_ids.tolist() == [[11], [12]]
    assert long_ways == [1]
    step.short.add_request(step.slots[1], SamplingParams(**GREEDY))
    step.short.apply_staged_writes()
    step.short(step.logits, step.batch)
    assert long_ways == [1]


@TRITON_HERE
def test_prompts_and_drafts_take_no_shortcut(long_ways, monkeypatch):
    monkeypatch.setattr(Sampler, "sample", lambda *_, **__: (torch.tensor([11, 12]), None))
    step = Step(GREEDY, GREEDY)
    for name, value in (("has_prefill", True), ("num_tokens", 3)):
        before, kept = len(long_ways), getattr(step.batch, name)
        setattr(step.batch, name, value)
        step.short(step.logits, step.batch)
        assert len(long_ways) == before + 1
        setattr(step.batch, name, kept)


def made(**config: Any) -> StepState:
    found = StepState.__new__(StepState)
    found.model = None
    found.vllm_config = Having(**{"speculative_config": None, "kv_transfer_config": None} | config)
    return found


@pytest.mark.parametrize(
    ("built", "config", "mode", "more"),
    [
        (False, {}, CUDAGraphMode.FULL, {}),
        (True, {}, CUDAGraphMode.PIECEWISE, {}),
        (True, {}, CUDAGraphMode.NONE, {}),
        (True, {}, CUDAGraphMode.FULL, {"for_capture": True}),
        (True, {}, CUDAGraphMode.FULL, {"ubatch_idx": 0}),
        (True, {"speculative_config": object()}, CUDAGraphMode.FULL, {}),
        (True, {"kv_transfer_config": object()}, CUDAGraphMode.FULL, {}),
    ],
)
def test_metadata_is_left_out_only_where_a_replay_reads_none(monkeypatch, built, config, mode, more):
    asked: list[Any] = []
    monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda self, *a, **k: asked.append((a, k)) or {"layer": 1})
    arguments, foreseen, step_state = ("batch", mode, "tables", "slots", "groups", "config"), [], made(**config)
    step_state._sampler = Having(foresee=foreseen.append)
    found = step_state.prepare_attn(*arguments, **more)
    assert found == ({"layer": 1} if built else {})
    assert foreseen == ([] if "for_capture" in more else ["batch"]), "else no token is taken without logits"
    assert asked == ([(arguments, {"for_capture": False} | more)] if built else [])


def test_only_vllm_s_own_sampler_is_replaced_and_none_that_verifies(monkeypatch):
    class Watermarked(Sampler):
        pass

    sampler = Sampler.__new__(Sampler)
    sampler.top = 5
    replaced, rejection = made().custom_sampler(sampler)
    assert type(replaced) is PlainSampler
    assert replaced.top == 5
    assert rejection is None
    assert made(speculative_config=object()).custom_sampler(sampler) is None
    assert made().custom_sampler(Watermarked.__new__(Watermarked)) is None


def test_vllm_asks_the_model_for_its_state():
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    from npu_gptoss.serving.cuda.model import GptOssForCausalLM

    assert resolve_model_state_cls(Having(), GptOssForCausalLM.__new__(GptOssForCausalLM)) is state.StepState
