"""A call of `paged_attention` as launches: its decode rows in one, each round of prompts in two.

Prompts' keys are gathered into contiguous memory; the causal loop over them is in Triton or, for Hopper, in Gluon.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_gptoss.attention.metadata import DecodeMetadata, StepMetadata
from npu_gptoss.attention.operations import head_stride
from npu_gptoss.attention.triton.launch_decode import Call, decode
from npu_gptoss.attention.triton.plan import Plan, Prompts, Rows, make_plan
from npu_gptoss.attention.triton.prefill import gather_kernel, prefill_kernel
from npu_gptoss.attention.window import keys_before
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.tiles import tile
from npu_gptoss.kernels.triton_launch import INTERPRETED, launch, processors

LOG2_E = 1 / math.log(2)
GATHER_KEYS = 64


@dataclass(frozen=True)
class Tiling:
    """rows: of a tile, positions times query heads of a key head; keys: of a step. hopper: for the Gluon kernel."""

    rows: int
    keys: int
    warps: int
    stages: int
    hopper: bool = False

    def positions(self, group: int) -> int:
        """Returns the positions of a tile, with `group` query heads (a power of two) to a key head."""
        return max(self.rows // group, 1)


# Of the table are those for bfloat16 in Triton. A tile of the Gluon kernel is what its groups of warps hold.
WIDE = Tiling(rows=32, keys=32, warps=4, stages=1)
HOPPER = Tiling(rows=192, keys=128, warps=4, stages=2, hopper=True)


def tiling_for(dtype: torch.dtype, sliding_window: int | None) -> Tiling:
    """Returns the tiling of the Triton kernel."""
    if dtype == torch.float32:
        return WIDE
    return tile(f"attention.prefill.{'full' if sliding_window is None else 'window'}", Tiling)


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
    decodes: bool = True,
) -> None:
    """The kernel of attention.paged. decodes: as of `make_plan`."""
    stride = head_stride(key_cache, value_cache)
    if out.stride(-1) != 1:
        raise InputError(f"out must be contiguous in its last dimension, got strides {out.stride()}", field="out")
    if scale <= 0:
        raise InputError(f"scale must be positive, got {scale}", field="scale")
    query = query if query.stride(-1) == 1 else query.contiguous()
    group = triton.next_power_of_2(query.shape[1] // key_cache.shape[2])
    tiling = HOPPER if hopper else tiling_for(query.dtype, sliding_window)
    plan = _plan(metadata, sliding_window, tiling, group, query.device, decodes)
    before = keys_before(sliding_window)
    call = Call(
        query,
        (key_cache, value_cache),
        stride,
        metadata.block_table,
        sinks.contiguous(),
        scale * LOG2_E,
        -1 if before is None else before,
        out,
    )
    if plan.decode is not None:
        decode(call, plan.decode)
    for prompts in plan.rounds:
        _prefill(call, prompts, tiling)


run_gluon = functools.partial(run, hopper=True)
run_invariant = functools.partial(run, decodes=False)


def _plan(
    metadata: StepMetadata, sliding_window: int | None, tiling: Tiling, group: int, device: torch.device, decodes: bool
) -> Plan:
    if isinstance(metadata, DecodeMetadata) and decodes:
        return Plan(Rows(metadata.num_requests, metadata.max_seq_len, metadata.lengths, settled=True), ())
    # a step of decode looks the same to every layer
    positions = tiling.positions(group)
    tiled = metadata.max_query_len > 1 or not decodes
    key = ("attention.triton", decodes, *((sliding_window, positions, tiling.keys) if tiled else ()))
    plans = {} if isinstance(metadata, DecodeMetadata) else metadata.plans
    if key not in plans:
        plans[key] = make_plan(metadata, sliding_window, positions, tiling.keys, device, decodes=decodes)
    return plans[key]


def _prefill(call: Call, prompts: Prompts, tiling: Tiling) -> None:
    """One round of prompts."""
    query, constants, strides = call.query, call.constants, call.strides
    page, kv_heads, dim = call.caches[0].shape[1:]
    gathered = torch.empty(2, kv_heads * prompts.keys, dim, dtype=query.dtype, device=query.device)
    block = min(GATHER_KEYS, tiling.keys)
    launch(
        gather_kernel,
        (kv_heads, triton.cdiv(prompts.longest, block), prompts.requests.shape[0]),
        (*call.caches, call.block_table, prompts.requests, *gathered, prompts.keys, call.block_table.stride(0)),
        warps=4,
        PAGE=page,
        KV_HEADS=kv_heads,
        DIM=dim,
        STRIDE=call.stride,
        TILE_KEYS=tiling.keys,
        BLOCK=block,
    )
    units = prompts.tiles.shape[0] * kv_heads
    if tiling.hopper:
        from npu_gptoss.attention.triton import hopper
        from npu_gptoss.kernels.gluon_names import descriptor

        read = (query, *(descriptor(part, tiling.keys, dim) for part in gathered), call.sinks, call.out)
        hopper.prefill_kernel[(min(units, processors(query.device)),)](
            *(*read, prompts.requests, prompts.tiles, units, prompts.keys, call.scale, *strides),
            BLOCK_N=tiling.keys,
            STAGES=tiling.stages,
            num_warps=tiling.warps,
            **constants,
        )
        return
    read = (query, *(TensorDescriptor.from_tensor(part, [tiling.keys, dim]) for part in gathered), call.sinks, call.out)
    launch(
        prefill_kernel,
        (units,),
        (*read, prompts.requests, prompts.tiles, call.scale, prompts.keys, *strides),
        warps=tiling.warps,
        BLOCK_Q=tiling.positions(constants["GROUP"]),
        BLOCK_N=tiling.keys,
        WIDE=INTERPRETED or query.dtype == torch.float32,
        num_stages=tiling.stages,
        **constants,
    )
