"""Steady steps that verify drafts and make new ones, as five or six replays (see `steady`; vLLM 0.33, second runner).

vLLM's own functions are captured: they verify the drafts, write the drafter's inputs, and then those of the next step.
Between them vLLM's two graphs of an EAGLE3 drafter run: over the step's rows, and for each further draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from npu_gptoss.serving.cuda.steady import SteadySteps, Tokens
from npu_gptoss.serving.releases.vllm import (
    CUDAGraphMode,
    EagleSpeculator,
    InputBatch,
    Sampler,
    combine_sampled_and_draft_tokens,
    prepare_pos_seq_lens,
    use_workspace_lane,
)


class DraftSteps(SteadySteps):
    """The steps of a runner with an EAGLE3 drafter, verified by vLLM's rejection sampler."""

    most = 8  # with more requests the host takes no longer than the GPU
    kinds = (False,)  # vLLM's kernels read each request's temperature

    def __init__(self, runner: Any) -> None:
        self.drafts = runner.speculator.num_speculative_steps
        super().__init__(runner)
        device, most, each = runner.device, len(self._requests), 1 + self.drafts
        self._of_rows = torch.zeros(most * each, dtype=torch.int64, device=device)  # the request of each row
        self._places = torch.arange(most * each, dtype=torch.int32, device=device) % each
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device) * each
        self._tokens = torch.zeros(most, each, dtype=torch.int64, device=device)
        self._counts = torch.zeros(most, dtype=torch.int32, device=device)
        # vLLM's tables on the host, which has two of each and changes between them; graphs read one of ours
        sampling, states = runner.sampler.sampling_states, runner.req_states
        on_host = states.prefill_len, sampling.temperature, sampling.seeds, runner.block_tables.num_blocks
        self._tables = [(table, table.gpu.clone()) for table in on_host]

    @classmethod
    def _serves(cls, runner: Any) -> bool:
        drafter, sampler = runner.speculator, runner.sampler
        if type(drafter) is not EagleSpeculator or type(sampler) is not Sampler:
            return False
        others = drafter.acceptance_estimator, drafter.draft_watermarker, drafter.eplb_state, sampler.trace_replay_state
        return (
            all(other is None for other in others)
            and (drafter.supports_decode_metadata_update or drafter.num_speculative_steps == 1)
            and not drafter.speculative_config.uses_dynamic_speculative_decoding()
            and not (drafter.supports_mm_inputs or sampler.compute_nans or sampler.return_sampling_mask)
        )

    def _takes(self, batch: Any) -> bool:
        """Every request verifies all its drafts, and wants nothing but tokens at temperature 0 or 1."""
        requests, sampler, self._greedy = batch.idx_mapping_np, self.sampler, False
        return (
            batch.num_draft_tokens == batch.num_reqs * self.drafts
            and batch.num_tokens == batch.num_reqs * (1 + self.drafts)
            and not batch.has_prefill
            and not sampler.needs_logits_processing[requests].any()
            and sampler.get_logprobs_dims(requests) is None
        )

    def _recorded(self, model: Any, rows: int, pool: Any) -> list[torch.cuda.CUDAGraph]:
        drafter, batch = self.runner.speculator, self._batch_of(model, rows)
        first, further = drafter.prefill_cudagraph_manager, drafter.decode_cudagraph_manager
        found = [first.dispatch(rows, batch.num_tokens_after_padding, 1 + self.drafts, 0)]
        found += [further.dispatch(rows, rows, 1, 0)] if self.drafts > 1 else []
        if any(graph.cg_mode != CUDAGraphMode.FULL for graph in found):
            return []
        with self._fixed_tables(), _without_replays(first, further):
            self._end(batch)  # compiles what is not compiled yet
            torch.cuda.synchronize()
            return captured(lambda: self._end(batch), (first, further), pool)

    def _batch_of(self, model: Any, rows: int) -> Any:
        """A batch of so many requests at fixed addresses. model: vLLM's descriptor of its graph."""
        each, buffers, requests = 1 + self.drafts, self.runner.input_buffers, model.num_reqs
        tokens, starts = rows * each, np.arange(rows + 1, dtype=np.int32) * each
        made = InputBatch.make_dummy(rows, tokens, buffers, max_query_len=each)
        return replace(
            made,
            num_reqs_after_padding=requests,
            idx_mapping=self._requests[:rows],
            expanded_idx_mapping=self._of_rows[:tokens],
            expanded_local_pos=self._places[:tokens],
            num_tokens_after_padding=model.num_tokens,
            num_draft_tokens=rows * self.drafts,
            num_draft_tokens_per_req=np.full(rows, self.drafts, dtype=np.int32),
            query_start_loc=buffers.query_start_loc[: requests + 1],
            query_start_loc_np=np.append(starts, np.full(requests - rows, tokens, dtype=np.int32)),
            seq_lens=buffers.seq_lens[:requests],
            seq_lens_cpu_upper_bound=torch.full((requests,), self.runner.max_model_len, dtype=torch.int32),
            input_ids=buffers.input_ids[: model.num_tokens],
            positions=buffers.positions[: model.num_tokens],
            logits_indices=torch.arange(tokens, device=self._of_rows.device),
            cu_num_logits=self._starts[: rows + 1],
            cu_num_logits_np=starts,
        )

    @contextlib.contextmanager
    def _fixed_tables(self) -> Iterator[None]:
        before = [table.gpu for table, _ in self._tables]
        for table, ours in self._tables:
            table.gpu = ours
        try:
            yield
        finally:
            for (table, _), gpu in zip(self._tables, before, strict=True):
                table.gpu = gpu

    def _write_inputs(self, batch: Any) -> None:
        rows = batch.num_reqs
        self._of_rows.view(-1, 1 + self.drafts)[:rows].copy_(batch.idx_mapping[:, None])
        for table, ours in self._tables:
            ours.copy_(table.gpu)
        self._inputs(batch)

    def _tokens_of(self, batch: Any) -> Tokens:
        return Tokens(self._tokens[: batch.num_reqs], self._counts[: batch.num_reqs], batch.req_ids, self._stats)

    def _end(self, batch: Any) -> None:
        """What follows the model's graph, as in vLLM's `sample_tokens`; vLLM's graphs are replayed within."""
        runner, states, sampling = self.runner, self.runner.req_states, self.sampler.sampling_states
        manager, rows = runner.cudagraph_manager, batch.num_tokens_after_padding
        hidden, tapped = manager.hidden_states[:rows], [each[:rows] for each in manager.aux_hidden_states]
        sampled, *counts = runner.sample(hidden, batch, None)
        self._tokens[: batch.num_reqs].copy_(sampled.sampled_token_ids)
        self._counts[: batch.num_reqs].copy_(counts[0])
        runner.postprocess_sampled(batch.idx_mapping, sampled.sampled_token_ids, *counts, batch.query_start_loc)
        with use_workspace_lane(runner._draft_workspace_lane):
            drafts = runner.speculator.propose(
                *(batch, {}, {}, hidden, tapped, *counts, states.last_sampled_tokens, states.next_prefill_tokens),
                *(sampling.temperature.gpu, sampling.seeds.gpu),
                num_speculative_tokens=self.drafts,
            )
        states.draft_tokens[batch.idx_mapping] = drafts
        self._inputs(batch)

    def _inputs(self, batch: Any) -> None:
        """The next step's, as vLLM's `prepare_inputs` and `prepare_attn` write them."""
        runner, states, buffers = self.runner, self.runner.req_states, self.runner.input_buffers
        prepare_pos_seq_lens(
            *(batch.idx_mapping, batch.query_start_loc, states.num_computed_tokens.gpu),
            *(buffers.positions, buffers.seq_lens),
        )
        # a request's last tokens have no place for next ones
        buffers.positions[: batch.num_tokens].clamp_(max=runner.max_model_len - 1)
        combine_sampled_and_draft_tokens(
            *(buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, batch.query_start_loc),
            *(buffers.seq_lens, states.prefill_len.gpu, states.draft_tokens, batch.cu_num_logits),
            *(len(batch.logits_indices), 1),
        )
        tables, slots = runner.prepare_attn(batch)
        runner.model_state.prepare_attn(
            batch, CUDAGraphMode.FULL, tables, slots, runner.attn_groups, runner.kv_cache_config
        )


@contextlib.contextmanager
def _without_replays(*managers: Any) -> Iterator[None]:
    """Makes vLLM's managers of graphs replay nothing."""
    for manager in managers:
        manager.run_fullgraph = lambda graph: None
    try:
        yield
    finally:
        for manager in managers:
            del manager.run_fullgraph


def captured(function: Callable[[], None], managers: tuple[Any, ...], pool: Any) -> list[torch.cuda.CUDAGraph]:
    """Captures a function in pieces: where it replays a graph of vLLM's, this graph stands between two pieces."""
    found: list[torch.cuda.CUDAGraph] = []

    def begin() -> None:
        found.append(torch.cuda.CUDAGraph())
        found[-1].capture_begin(pool, capture_error_mode="thread_local")

    def cut(manager: Any, graph: Any) -> None:
        found[-1].capture_end()
        found.append(manager.graphs[graph])
        begin()

    for manager in managers:
        manager.run_fullgraph = lambda graph, manager=manager: cut(manager, graph)
    begin()
    try:
        function()
    finally:
        found[-1].capture_end()
    return found
