"""Mistakes in an engine on the emulated 910B: the tests must detect all of them.

Loaded by `on_ascend.py` in the emulated environment. Each is a context manager, entered before the engine starts or
around one call of `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pkgutil
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

Function = Callable[..., Any]
ASCEND, EXPERTS = "npu_gptoss.attention.ascend", "npu_gptoss.moe.ascend"
CAPTURED, START = "npu_gptoss.serving.ascend.captured", "npu_gptoss.serving.ascend.start_check"
BUILDER = "npu_gptoss.serving.ascend.attention:AscendSinkMetadataBuilder"
PROPOSER = "vllm_ascend.spec_decode.llm_base_proposer:AscendSpecDecodeBaseProposer"


def replaced(owner: str, name: str, make: Callable[[Function], Function]) -> contextlib.AbstractContextManager[Any]:
    """Puts `make(the right function)` into the place of a function. owner: "module" or "module:class"."""
    found = pkgutil.resolve_name(owner)
    return mock.patch.object(found, name, make(getattr(found, name)))


def updates_late(right: Function) -> Function:
    before: dict[int, Any] = {}

    def update(stream: Any, call: Any, handle: Any, event: Any, lengths: Any) -> None:
        right(stream, call, handle, event, before.get(id(handle), lengths))
        before[id(handle)] = lengths

    return update


def block_table_rebound(right: Function) -> Function:
    kept = []

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = right(self, *args, **kwargs)
        kept.append(metadata.block_table.clone())
        return dataclasses.replace(metadata, block_table=kept[-1])

    return build


def padding_written(right: Function) -> Function:
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, **options: Any) -> Any:
        common = common_attn_metadata
        common.slot_mapping[common.num_actual_tokens :] = common.slot_mapping[0]
        return right(self, common_prefix_len, common, **options)

    return build


def first_groups_table(right: Function) -> Function:
    first: list[Any] = []  # the builder of the first group of layers, and its table of this step

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = right(self, *args, **kwargs)
        if not first or first[0] is self:
            first[:] = self, metadata.block_table
        return dataclasses.replace(metadata, block_table=first[1])

    return build


def sinks_without_slack(right: Function) -> Function:
    def call_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
        ours = right(*args, **kwargs)
        return ours | {"learnable_sink": ours["learnable_sink"].clone()}

    return call_arguments


def biases_spread(right: Function) -> Function:
    def grouped_mlp(rows: Any, experts: Any, counts: Any, group_list_type: int) -> Any:
        import torch
        import torch_npu

        from npu_gptoss.moe import ascend

        assert group_list_type == 1

        def product(x: Any, weight: Any, bias: Any) -> Any:
            expert_of_row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            how = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
            return torch_npu.npu_grouped_matmul(x=[x], weight=[weight], **how)[0] + bias[expert_of_row]

        gate_up = product(rows, experts.gate_up_proj, experts.gate_up_proj_bias)
        return product(ascend.clipped_swiglu(gate_up, experts), experts.down_proj, experts.down_proj_bias)

    return grouped_mlp


def packed_beside_bf16(right: Function) -> Function:
    kept = []

    def prepared(weights: Any, *args: Any) -> Any:
        kept.append(weights.expand(weights.dtype))
        return right(weights, *args)

    return prepared


def queries_too_long(right: Function) -> Function:
    def rotate_write(*tensors: Any) -> None:
        right(*tensors)
        tensors[-1].mul_(1.05)

    return rotate_write


def rows_not_cut(right: Function) -> Function:
    def unpad(rows: Any, tokens: int, name: str = "rows") -> Any:
        return rows if name in ("query", "out") else right(rows, tokens, name)

    return unpad


def refusing(number: int) -> Callable[[Function], Function]:
    """A driver that refuses the task update of this number, counted from here, and every later one."""

    def make(right: Function) -> Function:
        begun = [0]

        def graph_task_update_begin(*args: Any) -> None:
            begun[0] += 1
            if begun[0] >= number:
                raise RuntimeError("207000: this driver updates no task")
            right(*args)

        return graph_task_update_begin

    return make


def second_rank_fails(right: Function) -> Function:
    def execute_model(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        if self.rank == 1 and scheduler_output.scheduled_cached_reqs.req_ids:
            raise RuntimeError("507015: the second card")
        return right(self, scheduler_output, *more, **named)

    return execute_model


def returning(value: Any) -> Callable[[Function], Function]:
    return lambda right: lambda *_, **__: value


def _compute_slot_mapping_kernel(*arguments: Any) -> None:
    """vLLM 0.23's kernel of a step's slots on a card without Triton-Ascend: the decorator returns the function."""


def all_to_all(*arguments: Any, **options: Any) -> Any:
    from vllm_ascend.ascend_forward_context import MoECommType

    return MoECommType.ALLTOALL


ANSWERS: dict[tuple[int, ...], dict[int, int]] = {}  # by the beginning of a prompt: tokens by their place


def drafting(make: Callable[[list[int], int], list[int]]) -> list[tuple[str, str, Callable[[Function], Function]]]:
    """Drafts by `make(the tokens that follow in an earlier answer, their number)` in the place of n-grams' or of a
    head's, which runs all the same."""

    def drafts(runner: Any, row: int, tokens: dict[int, int], count: int) -> list[int]:
        """tokens: of the request in this row, up to its last one."""
        answer = ANSWERS.setdefault(tuple(runner.input_batch.token_ids_cpu[row, :20]), {})
        answer.update(tokens)
        end = max(tokens) + 1
        return make([answer.get(place, 0) for place in range(end, end + count)], count)

    def of_ngrams(right: Function) -> Function:
        def propose(self: Any, sampled: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
            def of(row: int) -> list[int]:
                batch = self.runner.input_batch
                tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
                return drafts(self.runner, row, dict(enumerate(tokens)), self.k)

            return [of(row) if new else [] for row, new in enumerate(sampled)]

        return propose

    def of_head(right: Function) -> Function:
        def _propose(self: Any, **asked: Any) -> torch.Tensor:
            tokens, places = (asked[f"target_{name}"].tolist() for name in ("token_ids", "positions"))
            rows = accepted(asked)
            made = right(self, **asked)
            for row, new in enumerate(asked["next_token_ids"].tolist()):
                known = {places[at]: tokens[at] for at in rows[row]} | {places[rows[row][-1]] + 1: new}
                made[row] = torch.tensor(drafts(self.runner, row, known, made.shape[1]))
            return made

        return _propose

    return [
        ("vllm_ascend.spec_decode.ngram_proposer:AscendNgramProposer", "propose", of_ngrams),
        (PROPOSER, "_propose", of_head),
    ]


def accepted(asked: dict[str, Any]) -> list[range]:
    """The rows of each request before a head drafts, without those of refused drafts."""
    starts, last = asked["common_attn_metadata"].query_start_loc_cpu.tolist(), asked["token_indices_to_sample"]
    ends = starts[1:] if last is None else [end + 1 for end in last.tolist()]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]


def head_reads_kept(right: Function) -> Function:
    kept: dict[int, torch.Tensor] = {}

    def _propose(self: Any, **asked: Any) -> torch.Tensor:
        for at in accepted(asked)[0]:
            kept[int(asked["target_positions"][at])] = asked["target_hidden_states"][at].cpu()
        torch.save(kept, os.environ["HEAD_READS"])
        return right(self, **asked)

    return _propose


PERFECT = drafting(lambda follow, count: follow)
ADVERSARIAL = drafting(lambda follow, count: [*follow[:-1], 1 + sum(follow) % 90])
DROPPED = (CAPTURED, "update", lambda right: lambda stream, call, handle, event, _: event.record(stream))
UNCHECKED = [(START, name, returning(None)) for name in ("attention", "rest")]
SPOILS: dict[str, list[tuple[str, str, Callable[[Function], Function]]]] = {
    # graphs replay with the lengths of their capture; only the events come
    "updates_dropped": [DROPPED],
    "drafts_perfect, updates_dropped": [*PERFECT, DROPPED],
    # each replay gets the lengths of the one before
    "updates_late": [(CAPTURED, "update", updates_late)],
    "replay_dropped": [("torch.npu:NPUGraph", "replay", returning(None))],
    # graphs are captured with a copy of the block table, which is never filled
    "block_table_rebound": [(BUILDER, "build_for_graph_capture", block_table_rebound)],
    # rows that a graph is padded with write their key over the first request's
    "padding_written": [(BUILDER, "build", padding_written)],
    "replays_not_awaited": [("torch.npu:Stream", "synchronize", returning(None))],
    # layers read the first group's blocks; with one group that is no mistake
    "first_groups_table": [(BUILDER, "build", first_groups_table)],
    # the sinks as torch would have made them: nothing behind them
    "sinks_without_slack": [(ASCEND, "call_arguments", sinks_without_slack)],
    # the checkpoint's columns go to the activation of halves, as in vllm-ascend's own experts
    "interleaved_weights": [(EXPERTS, "halves", lambda right: lambda columns: columns)],
    "not_checked_at_start": UNCHECKED,
    # as the card's compiler might build our launch
    "rotated_wrongly": [("npu_gptoss.dense.triton_ascend", "rotate_write", queries_too_long)],
    # the expanded experts stay on the device, too
    "packed_beside_bf16": [(EXPERTS, "_prepared", packed_beside_bf16)],
    # right, but the size of a result is known on the device only: the article's fourth; one rank, counts
    "biases_spread": [(EXPERTS, "grouped_mlp", biases_spread)],
    # shared prefixes are not counted
    "one_call_for_all": [
        (ASCEND, "parts", lambda right: lambda metadata, blocks, size: right(metadata, 1 << 30, size)),
        (CAPTURED, "fits_one_call", returning(True)),
    ],
    # the rows that a graph is padded with keep old memory
    "tail_not_zeroed": [("npu_gptoss.attention", "zero_tail", lambda right: lambda out, tokens: out)],
    # the operator gets the rows that a graph is padded with, and lists of the real requests: the article's fifth
    "rows_not_cut": [("npu_gptoss.attention", "unpad", rows_not_cut)],
    "updates_refused": [("torch.npu", "graph_task_update_begin", refusing(1))],
    "update_of_the_second_layer_refused": [("torch.npu", "graph_task_update_begin", refusing(2))],
    "without_triton": [
        (f"{package}.worker.block_table", "_compute_slot_mapping_kernel", lambda right: _compute_slot_mapping_kernel)
        for package in ("vllm.v1", "vllm_ascend")
    ],
    # rows that MC2 does not write keep old memory
    "combine_not_zeroed": [
        ("npu_gptoss.serving.releases.ascend_0_23", "written", lambda right: lambda rows, mask: rows)
    ],
    # from the first decode step on; the first rank, which answers for both, waits for the second in a collective
    "second_rank_fails": [("vllm_ascend.worker.worker:NPUWorker", "execute_model", second_rank_fails)],
    # No mistakes: of drafts none is right, all are, or all but each step's last
    "drafts_none": drafting(lambda follow, count: []),
    "drafts_random": drafting(lambda follow, count: random.choices(range(96), k=count)),
    "drafts_some": drafting(lambda follow, count: follow[: random.randint(0, count)]),
    "drafts_perfect": PERFECT,
    "drafts_adversarial": ADVERSARIAL,
    # the lengths of a step in flight count its refused drafts, too
    "drafts_adversarial, lengths_uncorrected": [
        *ADVERSARIAL,
        ("vllm_ascend.worker.model_runner_v1:NPUModelRunner", "_correct_optimistic_seq_lens_cpu", returning(None)),
    ],
    # what a head gets of its target, by the place in the first request, goes to the file HEAD_READS
    "head_reads_kept": [(PROPOSER, "_propose", head_reads_kept)],
    # No mistake: experts get their tokens as vllm-ascend sends them on an A3; on a 910B it never does for gpt-oss.
    "by_all_to_all": [
        ("vllm_ascend.worker.model_runner_v1:NPUModelRunner", "_select_moe_comm_method", lambda right: all_to_all)
    ],
}


@contextlib.contextmanager
def spoilt(name: str | None) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for change in SPOILS[name] if name else ():
            stack.enter_context(replaced(*change))
        yield
