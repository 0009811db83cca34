"""Steady steps leave behind what vLLM's runner does, bit for bit, and only steps that may be steady are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.sample.sampler", reason="needs vLLM 0.33")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from npu_gptoss import dense
from npu_gptoss.serving.cuda.state import PlainSampler
from npu_gptoss.serving.cuda.steady import SteadySteps
from tests.addresses import pointed
from tests.triton import TRITON_HERE

VOCABULARY, HIDDEN, LONGEST, REQUESTS, BLOCK = 5000, 32, 64, 8, 4
CPU = torch.device("cpu")
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("vllm.v1.worker.gpu.buffer_utils.is_uva_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Having(record=lambda: None, synchronize=lambda: None))
    yield
    pointed.clear()


class Model:
    """Hidden states that depend on all inputs of a step."""

    shortlist, token_rows, config = None, 0, Having(vocab_size=VOCABULARY)
    tokens_only, undecided = False, None

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.gptoss, self.lm_head = self, torch.randn(VOCABULARY, HIDDEN).bfloat16()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return dense.logits(hidden, self.lm_head, kernel="small_ops")

    compute_logits = head


class Runner:
    """vLLM's runner as far as a step of decode goes, over vLLM's own tables and kernels. Each request has a prompt of
    `4 + index` tokens, computed but for the last; `blocks` hands out the cache's blocks in turn."""

    prepare_inputs, prepare_attn, sample = (
        GPUModelRunner.prepare_inputs, GPUModelRunner.prepare_attn, GPUModelRunner.sample
    )  # fmt: skip
    gather_batch_req_state = GPUModelRunner.gather_batch_req_state
    update_requests, postprocess_sampled = GPUModelRunner.update_requests, GPUModelRunner.postprocess_sampled
    pcp_manager = batch_sharder = rejection_sampler = fast_prefill = adaptive_verification = kv_block_zeroer = None
    use_pp, decode_query_len, is_last_pp_rank, device, max_num_reqs = False, 1, True, CPU, REQUESTS

    def __init__(self, *wanted: dict[str, Any]) -> None:
        self.req_states = RequestState(REQUESTS, LONGEST, LONGEST, 0, VOCABULARY, CPU)
        self.input_buffers = InputBuffers(REQUESTS, LONGEST, CPU)
        widths = [LONGEST // BLOCK, LONGEST // BLOCK]
        self.block_tables = BlockTables(
            [BLOCK, BLOCK], REQUESTS, LONGEST, widths, CPU, sliding_window_reach=[0, 2 * BLOCK]
        )
        pointed.extend(table.gpu for table in self.block_tables.block_tables)
        pointed.extend(self.block_tables.input_block_tables)
        self.model, self.model_config = Model(), Having(rswa_window=None)
        config = Having(reasoning_config=None)
        self.sampler = PlainSampler.of(Sampler(config, REQUESTS, VOCABULARY, CPU, self.req_states), self.model)
        self.model_state = Having(num_new_sampled_tokens_per_step=1, postprocess_state=lambda *_: None)
        self.cudagraph_manager, self.execute_model_state = self, None
        self.lora_state, self.assigned = LoraState(REQUESTS), []
        self.hidden_states = torch.zeros(REQUESTS, HIDDEN).bfloat16()
        self.computed, self.blocks = {}, iter(range(1, 999))
        for index, options in enumerate(wanted):
            self._add(f"r{index}", 4 + index, options)
        self.graphs = {self.graph: None}

    @property
    def graph(self) -> BatchExecutionDescriptor:
        return self.dispatch(len(self.computed), len(self.computed), 1, 0, max_query_len=1)

    def dispatch(self, requests: int, tokens: int, each: int, adapters: int, *, max_query_len: int) -> Any:
        assert [tokens, each, max_query_len] == [requests, 1, 1]
        rows = 1 << (requests - 1).bit_length()
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, rows, rows, 1, num_active_loras=adapters)

    def _set_active_loras(self, *inputs: Any) -> None:
        self.assigned.append(inputs)

    def _add(self, name: str, prompt: int, options: dict[str, Any]) -> None:
        states = self.req_states
        states.add_request(name, prompt, list(range(10, 10 + prompt)), prompt, LONGEST)
        slot = states.req_id_to_index[name]
        self.sampler.add_request(slot, SamplingParams(**options))
        self.block_tables.append_block_ids(slot, self._more(-(-prompt // BLOCK)), overwrite=True)
        states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        states.last_sampled_tokens[slot] = 7
        states.total_len.gpu[slot] += 1
        self.computed[name] = prompt

    def _more(self, count: int) -> tuple[list[int], ...]:
        return tuple([next(self.blocks) for _ in range(count)] for _ in range(2))

    def scheduled(self, **changes: Any) -> SchedulerOutput:
        names, computed = list(self.computed), list(self.computed.values())
        new = [self._more(1) if at % BLOCK == 0 else None for at in computed]
        cached = CachedRequestData(names, set(), [], {}, new, computed, [0] * len(names))
        found = SchedulerOutput.make_empty()
        found.scheduled_cached_reqs, found.total_num_scheduled_tokens = cached, len(names)
        found.num_scheduled_tokens = dict.fromkeys(names, 1)
        for name, value in changes.items():
            setattr(found, name, value)
        return found

    def run_fullgraph(self, graph: BatchExecutionDescriptor) -> torch.Tensor:
        """The model: mixes ids, positions, lengths, slots and the tables' rows."""
        rows, buffers, tables = graph.num_tokens, self.input_buffers, self.block_tables
        torch.manual_seed(2)
        read = [buffers.input_ids[:rows], buffers.positions[:rows], buffers.seq_lens[:rows], *tables.slot_mappings]
        read += [(table[:rows] * torch.arange(1, 1 + table.shape[1])).sum(1) for table in tables.input_block_tables]
        mixed = sum(torch.randn(HIDDEN) * each[:rows, None].float().cos() for each in read)
        self.hidden_states[:rows] = mixed.bfloat16()
        return self.hidden_states[:rows]

    def vllms(self, scheduled: SchedulerOutput) -> list[int]:
        """A step as vLLM runs it."""
        self.update_requests(scheduled)
        self.block_tables.apply_staged_writes()
        state, _ = self.gather_batch_req_state(scheduled, dummy_run=False)
        batch = self.prepare_inputs(scheduled, state, self.graph, 0)
        self.prepare_attn(batch)
        hidden = self.run_fullgraph(self.graph)
        unread = dict.fromkeys(ExecuteModelState._fields)
        self.execute_model_state = ExecuteModelState(**unread | {"input_batch": batch, "cudagraph_stats": "stats"})
        sampled, *counts = self.sample(hidden, batch, None)
        self.postprocess_sampled(batch.idx_mapping, sampled.sampled_token_ids, *counts, batch.query_start_loc)
        return self._moved(sampled.sampled_token_ids.view(-1).tolist())

    def _moved(self, tokens: list[int]) -> list[int]:
        self.computed = {name: at + 1 for name, at in self.computed.items()}
        return tokens

    def held(self) -> dict[str, list[Any]]:
        """All that the next step of vLLM's reads."""
        states, rows = self.req_states, self.graph.num_tokens
        tensors = {
            name: getattr(states, name).gpu for name in ("num_computed_tokens", "total_len", "all_token_ids")
        } | {"last": states.last_sampled_tokens}
        for index, table in enumerate(self.block_tables.input_block_tables):
            tensors[f"table {index}"] = table[:rows]
        return {name: tensor.tolist() for name, tensor in tensors.items()} | {
            "on the host": states.num_computed_tokens_np.tolist()
        }


def steady(runner: Runner) -> SteadySteps:
    found, rows = SteadySteps(runner), len(runner.computed)
    ending = Having(replay=lambda: found._end(runner.hidden_states[:rows]))
    found.graphs = {(rows, greedy): ending for greedy in (True, False)}
    return found


@TRITON_HERE
@pytest.mark.parametrize("wanted", [(GREEDY,), (DRAWN,), (GREEDY, DRAWN, DRAWN | {"seed": 4})])
def test_steady_steps_give_and_keep_what_vllms_do(wanted):
    """Over the ends of blocks, with vLLM's steps between."""
    right, ours = Runner(*wanted), Runner(*wanted)
    steps = steady(ours)
    for number in range(22):
        want = right.vllms(right.scheduled())
        scheduled = ours.scheduled()
        if number in (0, 9, 10):
            steps.forget()
            got = ours.vllms(scheduled)
            steps.remember()
        else:
            assert steps.step(scheduled), number
            output = steps.output().get_output()
            assert output.req_ids == list(ours.computed)
            assert [output.req_id_to_index[name] for name in output.req_ids] == list(range(len(wanted)))
            assert output.cudagraph_stats == "stats"
            got = ours._moved([token for (token,) in output.sampled_token_ids])
            assert steps.output() is None, "a step's output is given once"
        assert got == want
        assert ours.held() == right.held()
    assert len(set(want)) == len(wanted)


@TRITON_HERE
def test_a_steady_step_reads_an_adapter_in_another_ones_place():
    """vLLM may have put another adapter in the place of one of these between two steps."""
    runner = Runner(GREEDY, GREEDY, GREEDY)
    adapter = LoRARequest("one", 3, "one")
    runner.lora_state.add_request("r1", runner.req_states.req_id_to_index["r1"], adapter)
    with_adapter = runner.dispatch(3, 3, 1, 1, max_query_len=1)
    steps, ran, run = steady(runner), [], runner.run_fullgraph
    runner.run_fullgraph = lambda graph: (ran.append(graph), run(graph))[1]
    runner.vllms(runner.scheduled())
    steps.remember()
    assert not steps.step(runner.scheduled()), "the adapter's graph was not captured"
    runner.graphs[with_adapter] = None
    steps.remember()
    ran.clear()
    for number in range(2):
        assert steps.step(runner.scheduled()), number
        runner._moved([])
    assert ran == [with_adapter] * 2
    assert runner.assigned == [((0, 3, 0), (0, 3, 0), {adapter})] * 2


@TRITON_HERE
def test_a_request_may_reach_the_end_of_its_table():
    """The step that computes the last token writes inputs of a next one, which has no block."""
    runner = Runner(GREEDY)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    steps.remember()
    while runner.computed["r0"] < LONGEST:
        assert steps.step(runner.scheduled())
        runner._moved([])
    assert runner.req_states.num_computed_tokens.gpu.max() == LONGEST


def stale(steps: SteadySteps, hidden: torch.Tensor) -> Any:
    """A graph that takes the tokens that it took at its capture."""
    steps._end(hidden)
    tokens = steps._tokens.clone()

    def replay() -> None:
        steps._tokens.copy_(tokens)
        steps._inputs(len(hidden), advance=True)

    return Having(replay=replay)


WRONG: dict[str, Any] = {
    "nothing": lambda steps, hidden: Having(replay=lambda: None),
    "the tokens of its capture": stale,
    "no inputs of a next step": lambda steps, hidden: Having(
        replay=lambda: steps._tokens[: len(hidden)].copy_(steps.sampler.take(hidden, *steps._drawn(len(hidden))))
    ),
}


@TRITON_HERE
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_graph_that_does_something_else_is_dropped_at_the_start(wrong, monkeypatch, caplog):
    runner = Runner(GREEDY)
    steps, broken = SteadySteps(runner), (2, False)

    def captured(hidden: torch.Tensor, pool: Any, greedy: bool) -> Any:
        if (len(hidden), greedy) == broken:
            return wrong(steps, hidden)
        return Having(replay=lambda: steps._end(hidden))

    monkeypatch.setattr("npu_gptoss.serving.cuda.steady.MOST", 3)
    monkeypatch.setattr("npu_gptoss.serving.cuda.steady.graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("npu_gptoss.serving.cuda.steady.agreed", lambda values, operation: values)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = SteadySteps(runner)
    monkeypatch.setattr(steps, "_captured", captured)
    runner.hidden_states.copy_(torch.randn(runner.hidden_states.shape))
    steps.capture()
    assert sorted(steps.graphs) == [key for key in itertools.product((1, 2, 3), (False, True)) if key != broken]
    (warned,) = [record for record in caplog.records if "is wrong and not used" in record.message]
    assert "of 2 requests" in warned.message
    states = runner.req_states
    for used in (states.num_computed_tokens.gpu, states.total_len.gpu, states.last_sampled_tokens):
        assert not used.any()


CHANGES: dict[str, dict[str, Any]] = {
    "a new request": {"scheduled_new_reqs": ["new"]},
    "one that ended": {"finished_req_ids": {"r9"}},
    "one preempted": {"preempted_req_ids": {"r9"}},
    "a structure": {"has_structured_output_requests": True},
    "blocks to zero": {"new_block_ids_to_zero": [3]},
    "blocks to copy": {"kv_cache_block_copies": ["copy"]},
    "a chunk": {"num_scheduled_tokens": {"r0": 2, "r1": 1}, "total_num_scheduled_tokens": 3},
    "one left out": {"num_scheduled_tokens": {"r0": 1}, "total_num_scheduled_tokens": 1},
    "another order": {"num_scheduled_tokens": {"r1": 1, "r0": 1}},
    "lengths in another order": {
        "scheduled_cached_reqs": CachedRequestData(["r1", "r0"], set(), [], {}, [None] * 2, [6, 5], [])
    },
    "one resumed": {"scheduled_cached_reqs": CachedRequestData(["r0", "r1"], {"r1"}, [], {}, [None] * 2, [5, 6], [])},
}


@TRITON_HERE
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_step_with_anything_new_is_vllms(changes):
    runner = Runner(GREEDY, GREEDY)
    steps = steady(runner)
    runner.vllms(runner.scheduled())
    steps.remember()
    before = runner.held()
    assert not steps.step(runner.scheduled(**changes))
    assert steps.output() is None
    assert runner.held() == before
    assert steps.step(runner.scheduled())
    steps.forget()
    assert not steps.step(runner.scheduled()), "vLLM's step in between may have changed the tables"


@TRITON_HERE
@pytest.mark.parametrize(
    "wanted",
    [
        (GREEDY, {"temperature": 0.7, "seed": 3}),
        ({"temperature": 0.0, "logprobs": 2},),
        ({"temperature": 0.0, "presence_penalty": 1.0},),
        (GREEDY,) * (REQUESTS - 1),
    ],
)
def test_requests_that_want_more_than_tokens_get_no_steady_step(wanted, monkeypatch):
    monkeypatch.setattr("npu_gptoss.serving.cuda.steady.MOST", REQUESTS - 2)
    runner = Runner(*wanted)
    steps = steady(runner)
    runner.sampler.is_plain(Having(num_reqs=1, num_tokens=2, has_prefill=False))
    state, _ = runner.gather_batch_req_state(runner.scheduled(), dummy_run=False)
    batch = runner.prepare_inputs(runner.scheduled(), state, runner.graph, 0)
    runner.execute_model_state = Having(input_batch=batch, cudagraph_stats=None)
    steps.remember()
    assert not steps.step(runner.scheduled())


@TRITON_HERE
def test_a_structure_before_or_a_dropped_graph_ends_steady_steps():
    runner = Runner(GREEDY)
    steps = steady(runner)
    steps.remember()  # after a step of no tokens, such as one that only ends requests
    runner.vllms(runner.scheduled())
    runner.execute_model_state.input_batch.has_structured_output_reqs = True
    steps.remember()
    assert not steps.step(runner.scheduled())
    runner.execute_model_state.input_batch.has_structured_output_reqs = False
    steps.remember()
    assert steps.step(runner.scheduled())
    runner.graphs.clear()  # as the canary does where replays are wrong
    steps.forget()
    steps.remember()
    assert not steps.step(runner.scheduled())


PARTS = (
    *("pcp_manager", "batch_sharder", "aux_output_connector", "ubatch_runner", "speculator", "kv_transfer_config"),
)


def served(**changes: Any) -> Any:
    alone = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "check_ep_fault": False}
    found = Having(**dict.fromkeys(PARTS) | alone | {"max_num_reqs": 4, "device": CPU} | changes)
    found.vllm_config, found.parallel_config = found, found
    found.sampler = (kind := changes.get("sampling", PlainSampler)).__new__(kind)
    return found


OTHERS = dict.fromkeys(PARTS, object()) | {
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "check_ep_fault": True,
    "sampling": Sampler,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_runner_with_other_parts_has_no_steady_steps(name):
    assert SteadySteps.of(served()) is not None
    assert SteadySteps.of(served(**{name: OTHERS[name]})) is None
