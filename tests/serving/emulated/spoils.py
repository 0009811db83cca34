"""Mistakes in an engine on the emulated 910B, a function each: the tests must see each of them.

Loaded by `on_ascend.py` in the emulated environment. Each is a context manager, entered before the engine starts or
around one call of `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

Spoil = contextlib.AbstractContextManager[Any]


def updates_dropped() -> Spoil:
    """Graphs replay with the lengths of their capture; only the events come."""
    from npu_gptoss.serving.ascend import captured

    def update(stream: Any, call: Any, handle: Any, event: Any, lengths: Any) -> None:
        event.record(stream)

    return mock.patch.object(captured, "update", update)


def updates_late() -> Spoil:
    """Each replay gets the lengths of the one before."""
    from npu_gptoss.serving.ascend import captured

    right, before = captured.update, {}

    def update(stream: Any, call: Any, handle: Any, event: Any, lengths: Any) -> None:
        key = id(handle)
        right(stream, call, handle, event, before.get(key, lengths))
        before[key] = lengths

    return mock.patch.object(captured, "update", update)


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """As vLLM 0.23 leaves the kernel of a step's slots on a card without Triton-Ascend: the decorator gives it back."""
    from vllm.v1.worker import block_table
    from vllm_ascend.worker import block_table as theirs

    def _compute_slot_mapping_kernel(*arguments: Any) -> None:
        pass

    with (
        mock.patch.object(block_table, "_compute_slot_mapping_kernel", _compute_slot_mapping_kernel),
        mock.patch.object(theirs, "_compute_slot_mapping_kernel", _compute_slot_mapping_kernel),
    ):
        yield


@contextlib.contextmanager
def without_triton_unchecked() -> Iterator[None]:
    from npu_gptoss.serving.ascend import limits

    with without_triton(), mock.patch.object(limits, "triton_objection", return_value=None):
        yield


def replay_dropped() -> Spoil:
    import torch

    return mock.patch.object(torch.npu.NPUGraph, "replay")


def block_table_rebound() -> Spoil:
    """Graphs are captured with a copy of the block table, which is never filled."""
    from npu_gptoss.serving.ascend.attention import AscendSinkMetadataBuilder

    right = AscendSinkMetadataBuilder.build_for_graph_capture

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = right(self, *args, **kwargs)
        build.kept.append(metadata.block_table.clone())
        return dataclasses.replace(metadata, block_table=build.kept[-1])

    build.kept = []
    return mock.patch.object(AscendSinkMetadataBuilder, "build_for_graph_capture", build)


def choice_not_narrowed() -> Spoil:
    from vllm_ascend.sample.sampler import AscendTopKTopPSampler

    return mock.patch.object(AscendTopKTopPSampler, "_apply_top_k_top_p", lambda self, logits, k, p: logits)


def window_of_129() -> Spoil:
    from npu_gptoss.attention import ascend

    return mock.patch.object(ascend, "keys_before", lambda window: window)


def query_strided() -> Spoil:
    import torch

    from npu_gptoss.attention import ascend

    def strided(query: Any, *args: Any, **kwargs: Any) -> Any:
        return right(torch.stack([query, query], -1)[..., 0], *args, **kwargs)

    right = ascend.call_arguments
    return mock.patch.object(ascend, "call_arguments", strided)


def sinks_dropped() -> Spoil:
    from npu_gptoss.attention import ascend

    right = ascend.call_arguments
    return mock.patch.object(ascend, "call_arguments", lambda *a, **k: {**right(*a, **k), "learnable_sink": None})


def sinks_without_slack() -> Spoil:
    """The sinks as torch would have made them: nothing behind them."""
    from npu_gptoss.attention import ascend

    def bare(*args: Any, **kwargs: Any) -> Any:
        arguments = right(*args, **kwargs)
        return {**arguments, "learnable_sink": arguments["learnable_sink"].clone()}

    right = ascend.call_arguments
    return mock.patch.object(ascend, "call_arguments", bare)


def interleaved_weights() -> Spoil:
    """The checkpoint's columns go to the activation of halves, as in vllm-ascend's own experts."""
    from npu_gptoss.moe import ascend

    return mock.patch.object(ascend, "halves", lambda columns: columns)


@contextlib.contextmanager
def interleaved_weights_unchecked() -> Iterator[None]:
    with not_checked_at_start(), interleaved_weights():
        yield


@contextlib.contextmanager
def packed_scale_off_by_one() -> Iterator[None]:
    """Each expert's first group of 32 rows is twice as large."""
    from npu_gptoss.moe import ascend

    def pack(*args: Any, **kwargs: Any) -> Any:
        packed = right(*args, **kwargs)
        packed.scales[:, 0] += 1
        return packed

    right = ascend.pack
    with not_checked_at_start(), mock.patch.object(ascend, "pack", pack):
        yield


@contextlib.contextmanager
def packed_beside_bf16() -> Iterator[None]:
    """The expanded experts stay on the device, too."""
    from npu_gptoss.moe import ascend

    def prepared(weights: Any, *args: Any) -> Any:
        kept.append(weights.expand(weights.dtype))
        return right(weights, *args)

    right, kept = ascend._prepared, []
    with mock.patch.object(ascend, "_prepared", prepared):
        yield


def biases_in_bf16() -> Spoil:
    from npu_gptoss.moe import ascend

    right = ascend.grouped_mlp

    def grouped_mlp(rows: Any, experts: Any, *group_list: Any) -> Any:
        import torch

        biases = {name: getattr(experts, name).to(torch.bfloat16) for name in ("gate_up_proj_bias", "down_proj_bias")}
        return right(rows, dataclasses.replace(experts, **biases), *group_list)

    from npu_gptoss.serving.ascend import moe

    return mock.patch.object(moe, "grouped_mlp", grouped_mlp)


def upstream_lists() -> Spoil:
    """The query list as vllm-ascend's builder makes it for a padded decode step: one short of the rows."""
    from npu_gptoss.attention import ascend

    right = ascend.call_arguments

    def arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
        ours = right(*args, **kwargs)
        return {**ours, "actual_seq_qlen": ours["actual_seq_qlen"][:-1] or [1]}

    return mock.patch.object(ascend, "call_arguments", arguments)


@contextlib.contextmanager
def one_call_for_all() -> Iterator[None]:
    """Shared prefixes are not counted."""
    from npu_gptoss.attention import ascend
    from npu_gptoss.serving.ascend import captured

    right = ascend.parts
    with (
        mock.patch.object(ascend, "parts", lambda metadata, blocks, size: right(metadata, 1 << 30, size)),
        mock.patch.object(captured, "fits_one_call", return_value=True),
    ):
        yield


def tail_not_zeroed() -> Spoil:
    """The rows that a graph is padded with keep old memory."""
    from npu_gptoss import attention

    return mock.patch.object(attention, "zero_tail", lambda out, tokens: out)


def biases_spread() -> Spoil:
    """Right, but the size of a result is known on the device only: the article's fourth. One rank, counts."""
    from npu_gptoss.moe import ascend
    from npu_gptoss.serving.ascend import moe

    def grouped_mlp(rows: Any, experts: Any, counts: Any, group_list_type: int) -> Any:
        import torch
        import torch_npu

        assert group_list_type == 1

        def product(x: Any, weight: Any, bias: Any) -> Any:
            expert_of_row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            how = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
            return torch_npu.npu_grouped_matmul(x=[x], weight=[weight], **how)[0] + bias[expert_of_row]

        gate_up = product(rows, experts.gate_up_proj, experts.gate_up_proj_bias)
        return product(ascend.clipped_swiglu(gate_up, experts), experts.down_proj, experts.down_proj_bias)

    return mock.patch.object(moe, "grouped_mlp", grouped_mlp)


def rows_not_cut() -> Spoil:
    """The operator gets the rows that a graph is padded with, and lists of the real requests: the article's fifth."""
    from npu_gptoss import attention

    right = attention.unpad

    def unpad(rows: Any, tokens: int, name: str = "rows") -> Any:
        return rows if name in ("query", "out") else right(rows, tokens, name)

    return mock.patch.object(attention, "unpad", unpad)


def by_all_to_all() -> Spoil:
    """No mistake: experts get their tokens as vllm-ascend sends them on an A3; on a 910B it never does for gpt-oss."""
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    return mock.patch.object(NPUModelRunner, "_select_moe_comm_method", return_value=MoECommType.ALLTOALL)


@contextlib.contextmanager
def not_checked_at_start() -> Iterator[None]:
    from npu_gptoss.serving.ascend import start_check

    with mock.patch.object(start_check, "attention"), mock.patch.object(start_check, "rest"):
        yield


def refusing_update(number: int) -> Spoil:
    """A driver that refuses the task update of this number, counted from here, and every one after it."""
    import torch

    right, begun = torch.npu.graph_task_update_begin, [0]

    def graph_task_update_begin(*args: Any) -> None:
        begun[0] += 1
        if begun[0] >= number:
            raise RuntimeError("207000: this driver updates no task")
        right(*args)

    return mock.patch.object(torch.npu, "graph_task_update_begin", graph_task_update_begin)


def updates_refused() -> Spoil:
    return refusing_update(1)


def update_of_the_second_layer_refused() -> Spoil:
    return refusing_update(2)


def spoilt(name: str | None) -> Spoil:
    return globals()[name]() if name else contextlib.nullcontext()
