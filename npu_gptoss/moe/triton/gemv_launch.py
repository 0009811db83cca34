"""The launches of `gemv.py`."""

from __future__ import annotations

import torch
import triton

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_launch import INTERPRETED, launch_options
from npu_gptoss.moe.triton.gemv import down_one, gate_up_one
from npu_gptoss.moe.triton.layout import BAND, TiledExperts

CHUNK = 16  # tiles of 64 inputs that a program opens at once
DOWN_ROWS = 8
WARPS = 4


def expert_mlp_gemv(
    hidden: torch.Tensor,
    experts: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
    *,
    chunk: int = CHUNK,
    down_chunk: int = CHUNK,
    down_rows: int = DOWN_ROWS,
    warps: int = WARPS,
    ahead: bool = True,
) -> torch.Tensor:
    """Two launches for one token in MXFP4."""
    if hidden.shape[0] != 1 or experts.format != "mxfp4":
        raise InputError(
            f"the matrix-vector kernel takes one token in mxfp4, got {hidden.shape[0]} in {experts.format}"
        )
    if hidden.dtype != torch.bfloat16:
        raise InputError(f"hidden_states must be bfloat16 for the Triton kernels, got {hidden.dtype}")
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.float().contiguous()
    top_k = topk_ids.shape[1]
    has_map = experts.expert_map is not None
    expert_map = experts.expert_map if has_map else topk_ids
    gate_up, down = experts.gate_up, experts.down
    inner = torch.empty(top_k, down.inputs, dtype=hidden.dtype, device=hidden.device)
    out = torch.empty_like(hidden)
    common = {"HAS_MAP": has_map, "NATIVE": not INTERPRETED}
    gate_up_one[(gate_up.rows // (2 * BAND), top_k)](
        hidden.contiguous(),
        topk_ids,
        expert_map,
        gate_up.words,
        gate_up.scales,
        gate_up.bias,
        inner,
        swiglu_limit,
        R=gate_up.rows,
        K=gate_up.inputs,
        CHUNK=min(chunk, triton.next_power_of_2(triton.cdiv(gate_up.inputs, 64))),
        **common,
        **launch_options(hidden, warps),
    )
    down_one[(triton.cdiv(down.rows, down_rows),)](
        inner,
        topk_weights,
        topk_ids,
        expert_map,
        down.words,
        down.scales,
        down.bias,
        out,
        TOP_K=top_k,
        R=down.rows,
        K=down.inputs,
        BM=down_rows,
        AHEAD=ahead and down.inputs <= 64 * 64,
        CHUNK=min(down_chunk, triton.next_power_of_2(triton.cdiv(down.inputs, 64))),
        **common,
        **launch_options(hidden, warps),
    )
    return out
