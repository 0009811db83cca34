"""A decode step of the same requests as the step before, as two replays (vLLM 0.33, second runner).

With few requests the host takes longer than the GPU: vLLM makes each step's inputs anew, with some twenty launches.
If only the last tokens and the lengths are new, the GPU has all it needs. Here the model's graph is followed by a graph
that takes the tokens, puts them into vLLM's tables and writes the inputs of the next step. Every other step is vLLM's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from npu_gptoss.serving import logger
from npu_gptoss.serving.canary import agreed
from npu_gptoss.serving.cuda.state import PlainSampler
from npu_gptoss.serving.releases.vllm import AsyncModelRunnerOutput, CUDAGraphMode, ModelRunnerOutput, graph_capture

# So many requests are served in this way at most: with more, the model's graph takes longer than the host.
MOST = 16


@triton.jit
def _inputs_kernel(
    tokens,  # [rows] int64, of the step that ends; without ADVANCE unused
    requests,  # [rows] int64, the request of each row
    computed,  # [requests] int32; with ADVANCE moved on, as the next three
    last_tokens,  # [requests] int64
    total,  # [requests] int32
    all_tokens,  # [requests, most tokens] int32
    all_tokens_stride,
    input_ids,  # [rows] int32, written; as the next three
    positions,  # [rows] int64
    seq_lens,  # [rows] int32
    slots,  # [groups, most rows] int64
    slots_stride,
    tables,  # [groups], addresses of [requests, blocks] int32
    widths,  # [groups] int64, the blocks of a row
    block_sizes,  # [groups] int32
    GROUPS: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    row = tl.program_id(0)
    request = tl.load(requests + row)
    position = tl.load(computed + request)
    if ADVANCE:
        token = tl.load(tokens + row)
        length = tl.load(total + request)
        position += 1
        tl.store(computed + request, position)
        tl.store(last_tokens + request, token)
        tl.store(total + request, length + 1)
        tl.store(all_tokens + request * all_tokens_stride + length, token.to(tl.int32), mask=length < all_tokens_stride)
    else:
        token = tl.load(last_tokens + request)
    tl.store(input_ids + row, token.to(tl.int32))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(seq_lens + row, position + 1)
    for group in tl.static_range(GROUPS):
        width, size = tl.load(widths + group), tl.load(block_sizes + group)
        table = tl.load(tables + group).to(tl.pointer_type(tl.int32))
        # a request's last token has no place for a next one
        column = tl.minimum(position // size, width - 1)
        block = tl.load(table + request * width + column).to(tl.int64)
        tl.store(slots + group * slots_stride + row, block * size + position % size)


class SteadySteps:
    """The steady steps of one runner. `graphs`: the graph behind vLLM's graph of the model, by number of requests, and
    whether all of these are greedy."""

    def __init__(self, runner: Any) -> None:
        device, most = runner.device, min(MOST, runner.max_num_reqs)
        self.runner, self.sampler = runner, runner.sampler
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._requests = torch.arange(most, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(most, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.arange(most, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._batch: Any = None  # of the step before, which a steady one may follow
        self._model: Any = None  # vLLM's name of the model's graph for it
        self._entered = False  # True if that was a steady step
        self._stats: Any = None
        self._output: AsyncModelRunnerOutput | None = None

    @classmethod
    def of(cls, runner: Any) -> SteadySteps | None:
        """Returns None for a runner whose steps have other parts than ours: stages, data ranks, drafts, connectors.
        Ranks of tensor parallelism are served: all of them get the same steps."""
        config, ranks = runner.vllm_config, runner.vllm_config.parallel_config
        others = (
            *(config.kv_transfer_config, runner.speculator, runner.pcp_manager, runner.batch_sharder),
            *(runner.aux_output_connector, runner.ubatch_runner),
        )
        alone = ranks.data_parallel_size == ranks.pipeline_parallel_size == 1 and not runner.check_ep_fault
        plain = alone and type(runner.sampler) is PlainSampler and all(other is None for other in others)
        return cls(runner) if plain else None

    @torch.inference_mode()
    def capture(self) -> None:
        """Call it after vLLM's captures, without requests. Drops graphs that do something else than the launches."""
        manager, pool = self.runner.cudagraph_manager, torch.cuda.graph_pool_handle()
        with graph_capture(self.runner.device):
            for rows in range(len(self._requests), 0, -1):
                if manager.dispatch(rows, rows, 1, 0, max_query_len=1).cg_mode == CUDAGraphMode.FULL:
                    for greedy in (True, False):
                        self.graphs[rows, greedy] = self._captured(manager.hidden_states[:rows], pool, greedy)
        right = [int(self._is_right(key)) for key in self.graphs]
        for key, on_all in zip(list(self.graphs), agreed(right, torch.distributed.ReduceOp.MIN), strict=True):
            if not on_all:
                del self.graphs[key]
                logger.warning("npu-gptoss: a graph for steady steps of %d requests is wrong and not used.", key[0])
        self._clear()

    def _captured(self, hidden: torch.Tensor, pool: Any, greedy: bool) -> torch.cuda.CUDAGraph:
        self.sampler.greedy = greedy
        self._inputs(len(hidden), advance=False)  # compiles, as the next, what is not compiled yet
        self._end(hidden)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            self._end(hidden)
        finally:
            graph.capture_end()
        return graph

    def _is_right(self, key: tuple[int, bool]) -> bool:
        """Says whether a replay leaves behind what the launches do: tokens, tables, and the next step's inputs."""
        rows, self.sampler.greedy = key
        hidden = self.runner.cudagraph_manager.hidden_states[:rows]
        hidden.copy_(torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view_as(hidden))
        states, buffers, tables = self.runner.req_states, self.runner.input_buffers, self.runner.block_tables
        found = []
        for run in (lambda: self._end(hidden), self.graphs[key].replay):
            self._clear()
            self._inputs(rows, advance=False)
            run()
            written = (
                *(self._tokens, states.num_computed_tokens.gpu, states.total_len.gpu, states.last_sampled_tokens),
                *(buffers.input_ids, buffers.positions, buffers.seq_lens, tables.slot_mappings.T),
            )
            found.append([each[:rows].clone() for each in written])
        return all(torch.equal(*pair) for pair in zip(*found, strict=True))

    def _clear(self) -> None:
        states = self.runner.req_states
        for used in (self._tokens, states.num_computed_tokens.gpu, states.total_len.gpu, states.last_sampled_tokens):
            used.zero_()

    def forget(self) -> None:
        """Forgets the steady batch, before a step of vLLM's."""
        self._batch, self._entered = None, False

    def remember(self) -> None:
        """Remembers the batch of a step of vLLM's, before its tokens are sampled."""
        state = self.runner.execute_model_state
        if state is None:
            return
        batch = state.input_batch
        if batch.num_reqs > len(self._requests) or batch.has_structured_output_reqs or not self.sampler.is_plain(batch):
            return
        rows, manager = batch.num_reqs, self.runner.cudagraph_manager
        adapters = len(self.runner.lora_state.get_activate_loras(batch.req_ids))
        model = manager.dispatch(rows, rows, 1, adapters, max_query_len=1)
        # the canary drops graphs that compute wrong steps
        if (rows, self.sampler.greedy) in self.graphs and model in manager.graphs:
            self._batch, self._model, self._stats = batch, model, state.cudagraph_stats

    @torch.inference_mode()
    def step(self, scheduled: Any) -> bool:
        """Runs the step, and returns True, if it is steady: the requests of the step before each get one token.

        scheduled: vLLM's SchedulerOutput. `output` then returns the step's tokens.
        """
        if self._batch is None or not self._goes_on(scheduled):
            return False
        batch, runner = self._batch, self.runner
        requests = scheduled.scheduled_cached_reqs
        runner.req_states.num_computed_tokens_np[batch.idx_mapping_np] = requests.num_computed_tokens
        if any(requests.new_block_ids):
            self._append(requests.new_block_ids)
        if not self._entered:
            self._enter()
        if self._model.num_active_loras:  # another request may have put its adapter in the place of one of these
            ones = np.ones(batch.num_reqs, dtype=np.int32)
            runner._set_active_loras(*runner.lora_state.make_lora_inputs(batch.req_ids, batch.idx_mapping_np, ones))
        runner.cudagraph_manager.run_fullgraph(self._model)
        self.graphs[batch.num_reqs, self.sampler.greedy].replay()
        self._output = Tokens(self._tokens[: batch.num_reqs], batch.req_ids, self._stats)
        return True

    def output(self) -> AsyncModelRunnerOutput | None:
        """Returns the steady step's output, once; None if the last step was none."""
        output, self._output = self._output, None
        return output

    def _goes_on(self, scheduled: Any) -> bool:
        names, requests = self._batch.req_ids, scheduled.scheduled_cached_reqs
        return (
            scheduled.total_num_scheduled_tokens == len(names)
            and requests.req_ids == names
            and list(scheduled.num_scheduled_tokens) == names
            and not (
                scheduled.scheduled_new_reqs
                or scheduled.finished_req_ids
                or scheduled.preempted_req_ids
                or scheduled.has_structured_output_requests
                or scheduled.new_block_ids_to_zero
                or scheduled.kv_cache_block_copies
                or requests.resumed_req_ids
            )
        )

    def _append(self, new_block_ids: list[Any]) -> None:
        """The requests' new blocks, with vLLM's own functions."""
        batch, tables = self._batch, self.runner.block_tables
        for request, blocks in zip(batch.idx_mapping_np.tolist(), new_block_ids, strict=True):
            if blocks is not None:
                tables.append_block_ids(request, blocks, overwrite=False)
        tables.apply_staged_writes()
        tables.gather_block_tables(
            batch.idx_mapping,
            num_reqs_padded=batch.num_reqs_after_padding,
            num_computed_tokens=self.runner.req_states.num_computed_tokens.gpu,
        )
        self._entered = False  # the slots are to be found again

    def _enter(self) -> None:
        """Writes the step's inputs, from vLLM's tables."""
        batch, states = self._batch, self.sampler.sampling_states
        rows = batch.num_reqs
        self._requests[:rows].copy_(batch.idx_mapping)
        # greedy ones too: without a shortlist, as on several ranks, they are picked by temperature
        self._temperatures[:rows].copy_(states.temperature.gpu[batch.idx_mapping])
        self._seeds[:rows].copy_(states.seeds.gpu[batch.idx_mapping])
        self._inputs(rows, advance=False)
        self._entered = True

    def _end(self, hidden: torch.Tensor) -> None:
        """The graph behind the model's. hidden [rows, hidden]."""
        rows = len(hidden)
        self._tokens[:rows].copy_(self.sampler.take(hidden, *self._drawn(rows)))
        self._inputs(rows, advance=True)

    def _drawn(self, rows: int) -> tuple[torch.Tensor, ...]:
        return self._temperatures, self._seeds, self._rows[:rows], self.runner.input_buffers.positions[:rows]

    def _inputs(self, rows: int, *, advance: bool) -> None:
        states, buffers, tables = self.runner.req_states, self.runner.input_buffers, self.runner.block_tables
        _inputs_kernel[(rows,)](
            *(self._tokens, self._requests, states.num_computed_tokens.gpu, states.last_sampled_tokens),
            *(states.total_len.gpu, states.all_token_ids.gpu, states.all_token_ids.gpu.stride(0)),
            *(buffers.input_ids, buffers.positions, buffers.seq_lens),
            *(tables.slot_mappings, tables.slot_mappings.stride(0)),
            *(tables.block_table_ptrs, tables.block_table_strides, tables.block_sizes_tensor),
            GROUPS=tables.num_kv_cache_groups,
            ADVANCE=advance,
            num_warps=1,
        )


class Tokens(AsyncModelRunnerOutput):
    """A step's tokens on their way to the host."""

    def __init__(self, tokens: torch.Tensor, names: list[str], stats: Any) -> None:
        """tokens [rows] int64, which the next step overwrites; names: the request of each row."""
        rows = {name: row for row, name in enumerate(names)}
        self._found = ModelRunnerOutput(req_ids=names, req_id_to_index=rows, cudagraph_stats=stats)
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._ready = torch.cuda.Event(blocking=True)
        self._ready.record()

    def get_output(self) -> ModelRunnerOutput:
        self._ready.synchronize()
        self._found.sampled_token_ids = [[token] for token in self._tokens.tolist()]
        return self._found

    def get_kv_connector_output(self) -> None:
        return None
