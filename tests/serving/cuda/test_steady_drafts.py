"""Steady steps with drafts leave behind what vLLM's runner does, bit for bit, and only steps that may be steady are."""

from __future__ import annotations

from types import SimpleNamespace as Having
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.sample.sampler", reason="needs vLLM 0.33")

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from npu_gptoss.serving.cuda import steady_drafts
from npu_gptoss.serving.cuda.steady_drafts import DraftSteps
from tests.serving.cuda.test_steady import (  # on_a_cpu is a fixture
    CPU,
    DRAWN,
    LONGEST,
    REQUESTS,
    VOCABULARY,
    Runner,
    on_a_cpu,
    served,
)
from tests.triton import TRITON_HERE

GREEDY = {"temperature": 0.0, "seed": 1}
DRAFTS = 2
EACH = 1 + DRAFTS
assert on_a_cpu


class Drafter(EagleSpeculator):
    """Drafts that depend on all that it is given; the target takes about a third of them."""

    acceptance_estimator = draft_watermarker = eplb_state = draft_logits = None
    supports_decode_metadata_update, supports_mm_inputs, num_speculative_steps = True, False, DRAFTS

    def __init__(self) -> None:
        self.speculative_config = Having(uses_dynamic_speculative_decoding=lambda: False)

    def propose(self, batch, metadata, slots, hidden, tapped, sampled, rejected, last, _, temperature, seeds, **more):
        assert more == {"num_speculative_tokens": DRAFTS}
        rows = batch.num_reqs
        said = last[batch.idx_mapping, 0] + sampled + 2 * rejected + temperature[batch.idx_mapping].long()
        said += batch.seq_lens[:rows] + seeds[batch.idx_mapping] + tapped[0][: rows * EACH : EACH, 0].long()
        return torch.stack([KNOWN[(said + place) % len(KNOWN)] for place in range(DRAFTS)], dim=1)


KNOWN = torch.tensor([11, 222, 3333])  # tokens that the model says


class DraftRunner(Runner):
    """A runner whose requests verify two drafts in each step."""

    decode_query_len, use_pp = EACH, False
    _draft_workspace_lane = 0

    def __init__(self, *wanted: dict[str, Any]) -> None:
        super().__init__(*wanted, states=RequestState(REQUESTS, LONGEST, LONGEST, DRAFTS, VOCABULARY, CPU))
        self.sampler = _plain(self.sampler)
        rules = Having(num_speculative_tokens=DRAFTS, rejection_sample_method="strict", enable_adaptive_verification=0)
        rules.fly_entropy_threshold, rules.fly_entropy_top_k = 0.0, 1
        self.rejection_sampler, self.speculator = RejectionSampler(self.sampler, rules, CPU), Drafter()
        self.attn_groups, self.kv_cache_config, self.max_model_len = [], None, LONGEST
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32)
        self.model_state.prepare_attn = lambda *_: self.lengths.copy_(self.input_buffers.seq_lens[:REQUESTS])
        self.hidden_states = torch.zeros(REQUESTS * EACH, self.hidden_states.shape[1]).bfloat16()
        self.aux_hidden_states = [torch.zeros(REQUESTS * EACH, 1)]

    @property
    def graph(self) -> BatchExecutionDescriptor:
        rows = 1 << (len(self.computed) - 1).bit_length()
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, rows * EACH, rows, EACH)

    def scheduled(self, **changes: Any) -> SchedulerOutput:
        """The host counts all drafts as taken, as vLLM's scheduler does until it hears otherwise."""
        names, computed = list(self.computed), list(self.computed.values())
        new = []
        for name, at in self.computed.items():
            wanted = -(-(at + EACH) // 4) - self.held_blocks[name]
            self.held_blocks[name] += max(wanted, 0)
            new.append(self._more(wanted) if wanted > 0 else None)
        found = SchedulerOutput.make_empty()
        found.scheduled_cached_reqs = CachedRequestData(names, set(), [], {}, new, computed, [0] * len(names))
        found.num_scheduled_tokens = dict.fromkeys(names, EACH)
        found.total_num_scheduled_tokens = EACH * len(names)
        found.scheduled_spec_decode_tokens = {name: [-1] * DRAFTS for name in names}
        found.num_spec_tokens_to_schedule = DRAFTS
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def run_fullgraph(self, graph: BatchExecutionDescriptor) -> torch.Tensor:
        """The model: says a known token, by all that it reads."""
        rows, buffers, tables = graph.num_tokens, self.input_buffers, self.block_tables
        requests = torch.arange(rows) // EACH
        mixed = buffers.input_ids[:rows].long() + 3 * buffers.positions[:rows] + self.lengths[requests]
        for table, slots in zip(tables.input_block_tables, tables.slot_mappings, strict=True):
            mixed += slots[:rows] + (table * torch.arange(1, 1 + table.shape[1])).sum(1)[requests]
        self.hidden_states[:rows] = self.model.lm_head[KNOWN[mixed % len(KNOWN)]]
        self.aux_hidden_states[0][:rows, 0] = (mixed % 7).float()
        return self.hidden_states[:rows]

    def vllms(self, scheduled: SchedulerOutput) -> list[list[int]]:
        self.update_requests(scheduled)
        self.block_tables.apply_staged_writes()
        state, _ = self.gather_batch_req_state(scheduled, dummy_run=False)
        batch = self.prepare_inputs(scheduled, state, self.graph, 0)
        self.prepare_attn(batch)
        self.model_state.prepare_attn()
        hidden = self.run_fullgraph(self.graph)
        noted = {"input_batch": batch, "cudagraph_stats": "stats", "num_spec_tokens_to_schedule": DRAFTS}
        self.execute_model_state = ExecuteModelState(**dict.fromkeys(ExecuteModelState._fields) | noted)
        sampled, *counts = self.sample(hidden, batch, None)
        self.postprocess_sampled(batch.idx_mapping, sampled.sampled_token_ids, *counts, batch.query_start_loc)
        states, sampling = self.req_states, self.sampler.sampling_states
        drafts = self.speculator.propose(
            *(batch, {}, {}, hidden, self.aux_hidden_states, *counts, states.last_sampled_tokens, None),
            *(sampling.temperature.gpu, sampling.seeds.gpu),
            num_speculative_tokens=DRAFTS,
        )
        states.draft_tokens[batch.idx_mapping] = drafts
        pairs = zip(sampled.sampled_token_ids.tolist(), counts[0].tolist(), strict=True)
        return self._moved([tokens[:count] for tokens, count in pairs])

    def _moved(self, tokens: list[Any]) -> list[Any]:
        """What the host knows of the lengths is two steps old at most; here it is exact."""
        for (name, at), said in zip(list(self.computed.items()), tokens, strict=True):
            self.computed[name] = at + len(said)
        return tokens

    def held(self) -> dict[str, list[Any]]:
        """Without the tables of a step, which are already those of the next one after a steady step."""
        found = {name: value for name, value in super().held().items() if not name.startswith("table")}
        return found | {"drafts": self.req_states.draft_tokens.tolist()}


def _plain(sampler: Any) -> Sampler:
    found = Sampler.__new__(Sampler)
    vars(found).update({name: value for name, value in vars(sampler).items() if not name.startswith("_")})
    return found


def steady(runner: DraftRunner) -> DraftSteps:
    found, rows = DraftSteps(runner), len(runner.computed)
    batch = found._batch_of(runner.graph, rows)

    def replay() -> None:
        with found._fixed_tables():
            found._end(batch)

    found.graphs = {(rows, False): (runner.graph, [Having(replay=replay)])}
    return found


@TRITON_HERE
@pytest.mark.parametrize("wanted", [(GREEDY,), (GREEDY, DRAWN, DRAWN | {"seed": 4})])
def test_steady_steps_with_drafts_keep_what_vllms_do(wanted):
    """Over the ends of blocks, with vLLM's steps between; the host's tables move at each of these."""
    right, ours = DraftRunner(*wanted), DraftRunner(*wanted)
    steps, lengths = steady(ours), set()
    for number in range(16):
        want = right.vllms(right.scheduled())
        scheduled = ours.scheduled()
        if number in (0, 7, 8):
            steps.forget()
            ours.sampler.apply_staged_writes()
            ours.req_states.apply_staged_writes()
            got = ours.vllms(scheduled)
            steps.remember()
        else:
            assert steps.step(scheduled), number
            got = ours._moved(steps.output().get_output().sampled_token_ids)
        assert got == want, number
        assert ours.held() == right.held(), number
        lengths.update(map(len, got))
    assert lengths == {1, 2, 3}, "no draft was taken, or each was"


@TRITON_HERE
def test_drafts_may_reach_beyond_a_requests_table():
    runner = DraftRunner(GREEDY)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    steps.remember()
    while runner.computed["r0"] + EACH <= LONGEST:
        assert steps.step(runner.scheduled())
        runner._moved(steps.output().get_output().sampled_token_ids)
    assert runner.input_buffers.seq_lens[0] > LONGEST
    assert runner.input_buffers.positions[:EACH].max() == LONGEST - 1


CHANGES: dict[str, dict[str, Any]] = {
    "fewer drafts": {"scheduled_spec_decode_tokens": {"r0": [-1], "r1": [-1] * DRAFTS}},
    "a chunk of so many tokens": {"scheduled_spec_decode_tokens": {"r1": [-1] * DRAFTS}},
    "fewer drafts wanted": {"num_spec_tokens_to_schedule": 1},
    "no drafts wanted": {"skip_drafts": True},
    "one token": {"num_scheduled_tokens": {"r0": 1, "r1": EACH}, "total_num_scheduled_tokens": 1 + EACH},
    "a new request": {"scheduled_new_reqs": ["new"]},
    "a structure": {"has_structured_output_requests": True},
}


@TRITON_HERE
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_step_with_other_drafts_is_vllms(changes):
    runner = DraftRunner(GREEDY, GREEDY)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    steps.remember()
    before = runner.held()
    assert not steps.step(runner.scheduled(**changes))
    assert runner.held() == before
    assert steps.step(runner.scheduled())


@TRITON_HERE
@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0},
    ],
)
def test_requests_with_more_wishes_verify_in_vllms_steps(wanted):
    runner = DraftRunner(GREEDY, wanted)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    steps.remember()
    assert not steps.step(runner.scheduled())


def test_a_step_whose_drafts_are_few_or_unwanted_begins_nothing():
    runner = DraftRunner(GREEDY)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    state = runner.execute_model_state
    batch = state.input_batch
    for changed in (
        state._replace(num_spec_tokens_to_schedule=0),
        state._replace(input_batch=Having(**vars(batch) | {"num_draft_tokens": 1})),
        state._replace(input_batch=Having(**vars(batch) | {"num_tokens": EACH + 1})),
        state._replace(input_batch=Having(**vars(batch) | {"has_prefill": True})),
    ):
        runner.execute_model_state = changed
        steps.remember()
        assert not steps.step(runner.scheduled())
    runner.execute_model_state = state
    steps.remember()
    assert steps.step(runner.scheduled())


class Graph:
    """Notes into `tape` what is called between the begin and the end of a capture."""

    tape: ClassVar[list[str]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        self.first = len(self.tape)

    def capture_end(self) -> None:
        self.held = self.tape[self.first :]


def test_vllms_graphs_stand_between_the_captured_pieces(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "tape", [])

    class Manager:
        graphs: ClassVar = {"rows": "the first", "further": "the others"}

        def run_fullgraph(self, graph: Any) -> None:
            raise AssertionError("replayed while a graph is captured")

    first, further = Manager(), Manager()

    def function() -> None:
        Graph.tape.append("verify")
        first.run_fullgraph("rows")
        Graph.tape.append("more")
        further.run_fullgraph("further")
        Graph.tape.append("inputs")

    with steady_drafts._without_replays(first, further):
        function()
        Graph.tape.clear()
        found = steady_drafts.captured(function, (first, further), "pool")
    assert [getattr(each, "held", each) for each in found] == [
        ["verify"],
        "the first",
        ["more"],
        "the others",
        ["inputs"],
    ]
    with pytest.raises(AssertionError, match="replayed"):
        first.run_fullgraph("rows")


ATTRIBUTES = (
    *("acceptance_estimator", "draft_watermarker", "eplb_state", "num_speculative_steps"),
    *("supports_decode_metadata_update", "supports_mm_inputs"),
)
OTHERS: dict[str, dict[str, Any]] = {
    "another drafter": {"speculator": object()},
    "no drafter": {"speculator": None},
    "a sampler of its own": {"sampler": object()},
    **{name: {"drafter": {name: object()}} for name in ("acceptance_estimator", "draft_watermarker", "eplb_state")},
    "pictures": {"drafter": {"supports_mm_inputs": True}},
    "a graph for each draft": {"drafter": {"supports_decode_metadata_update": False}},
    "numbers of drafts that change": {
        "drafter": {"speculative_config": Having(uses_dynamic_speculative_decoding=lambda: True)}
    },
    "counts of NaN": {"sampling": {"compute_nans": True}},
    "masks": {"sampling": {"return_sampling_mask": True}},
    "a trace": {"sampling": {"trace_replay_state": object()}},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("changes", [None, *OTHERS.values()], ids=["as served", *OTHERS])
def test_a_runner_with_other_drafters_has_no_steady_steps(changes):
    runner = DraftRunner(GREEDY)
    runner.speculator = EagleSpeculator.__new__(EagleSpeculator)
    given = dict(changes or {})
    vars(runner.speculator).update({name: getattr(Drafter, name) for name in vars(Drafter) if name in ATTRIBUTES})
    vars(runner.speculator).update({"speculative_config": Drafter().speculative_config} | given.pop("drafter", {}))
    vars(runner.sampler).update(given.pop("sampling", {}))
    rest = vars(served())
    for name in ("sampler", "speculator", "max_num_reqs", "device"):
        rest.pop(name)
    vars(runner).update(rest | given | {"vllm_config": Having(**rest | given), "parallel_config": None})
    runner.vllm_config.parallel_config = runner.vllm_config
    assert (DraftSteps.of(runner) is None) == bool(changes)
