"""A call of `paged_attention` as launches: its decode rows in one, each round of prompts in two."""

from __future__ import annotations

import functools

import torch
import triton

from npu_gptoss.attention.metadata import DecodeMetadata, StepMetadata
from npu_gptoss.attention.triton import launch_prompts
from npu_gptoss.attention.triton.launch_decode import decode
from npu_gptoss.attention.triton.launch_prompts import Tiling, prefill
from npu_gptoss.attention.triton.plan import Plan, Rows, make_plan
from npu_gptoss.errors import InputError


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    *,
    hopper: bool = False,
) -> None:
    """As `paged_attention` of the family."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous():
            raise InputError(
                f"{name} must be contiguous [blocks, block_size, kv_heads, head_dim], got strides {cache.stride()}"
            )
    if out.stride(-1) != 1:
        raise InputError(f"out must be contiguous in its last dimension, got strides {out.stride()}")
    if scale <= 0:
        raise InputError(f"scale must be positive, got {scale}")
    query = query if query.stride(-1) == 1 else query.contiguous()
    group = triton.next_power_of_2(query.shape[1] // key_cache.shape[2])
    tiling = launch_prompts.HOPPER if hopper else launch_prompts.tiling_for(query.dtype, sliding_window)
    plan = _plan(metadata, sliding_window, tiling, group, query.device)
    call = (query, key_cache, value_cache, metadata.block_table, sinks.contiguous(), scale, sliding_window, out)
    if plan.decode is not None:
        decode(*call, plan.decode)
    for prompts in plan.rounds:
        prefill(*call, prompts, tiling)


run_gluon = functools.partial(run, hopper=True)


def _plan(metadata: StepMetadata, sliding_window: int | None, tiling: Tiling, group: int, device: torch.device) -> Plan:
    if isinstance(metadata, DecodeMetadata):
        return Plan(Rows(metadata.num_requests, metadata.max_seq_len, metadata.lengths, settled=True), ())
    # a step of decode looks the same to every layer
    positions = tiling.positions(group)
    key = ("attention.triton", *((sliding_window, positions, tiling.keys) if metadata.max_query_len > 1 else ()))
    plans = metadata.plans
    if key not in plans:
        plans[key] = make_plan(metadata, sliding_window, positions, tiling.keys, device)
    return plans[key]
