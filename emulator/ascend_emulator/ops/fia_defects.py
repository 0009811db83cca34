"""Attention as a defective kernel computes it; `ascend_emulator.defects` names the defects and their sources."""

from __future__ import annotations

import torch
from ascend_emulator.context import OpContext
from ascend_emulator.ops.fia_call import TND_LAYOUTS, Plan

KEYS_PER_TILE, ROWS_PER_TILE, SPLIT_FROM = 512, 512, 2048
_window_calls = [0]


def merges_heads(plan: Plan, context: OpContext) -> bool:
    """True if this call takes the defect's path: packed tokens, one row per request, groups of at most 16 heads."""
    fia = plan.call
    return (
        "merged-heads" in context.defects
        and context.is_8_3
        and fia.layout in TND_LAYOUTS
        and all(rows == 1 for _, rows, _ in plan.requests)
        and plan.heads // plan.kv_heads <= 16
        and not fia.want_lse
    )


def merged_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    sink: torch.Tensor | None,
    context: OpContext,
) -> torch.Tensor:
    """query [1, N, D] over tiles of keys: only the first head of each group is rescaled when the maximum moves."""
    heads, dim = query.shape[1:]
    kv_heads = value.size(1)
    if visible is not None:
        key, value = key[visible[0]], value[visible[0]]
    grouped = query.float().reshape(kv_heads, heads // kv_heads, dim)
    peak = torch.full((kv_heads, heads // kv_heads, 1), float("-inf"))
    total = torch.zeros_like(peak)
    weighted = torch.zeros(kv_heads, heads // kv_heads, value.size(2))
    for first in range(0, key.size(0), KEYS_PER_TILE):
        tile = slice(first, first + KEYS_PER_TILE)
        scores = torch.einsum("hgd,khd->hgk", grouped, key[tile].float()) * scale
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shrink = torch.exp(peak - higher)
        p = torch.exp(scores - higher)
        total = total * shrink + p.sum(-1, keepdim=True)
        if first:
            shrink[:, 1:] = 1
        part = torch.einsum("hgk,khd->hgd", context.rounded(p, query.dtype).float(), value[tile].float())
        weighted, peak = weighted * shrink + part, higher
    if sink is not None:
        total = total + torch.exp(sink.reshape(kv_heads, -1, 1) - peak)
    return (weighted / total).reshape(1, heads, -1)


def spoil_sums(
    plan: Plan,
    context: OpContext,
    index: int,
    q_len: int,
    kv_len: int,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A request's sinks under the defect, and the defect's addition to each row's denominator [q_len, 1]."""
    defects, windowed = context.defects, plan.call.sparse_mode == 4
    if sink is not None and windowed and "window-race" in defects:
        _window_calls[0] += index == 0
        if _window_calls[0] % 2 == 0:
            sink = sink.clone()
            sink[1::2] = float("-inf")
    lone = len(plan.requests) == 1 and q_len == 1 and kv_len > SPLIT_FROM
    if sink is not None and lone and "sink-per-part" in defects and not context.is_8_3:
        sink = sink + torch.log(torch.tensor(2.0))
    if windowed and q_len >= ROWS_PER_TILE and kv_len > q_len and "hidden-first-tile" in defects:
        left = torch.zeros(q_len, 1)
        left[ROWS_PER_TILE - 7 : ROWS_PER_TILE] = KEYS_PER_TILE
        return sink, left
    return sink, None


UNSET, LOOKED_AT = 0xFF, 64  # the poison of unwritten memory; bytes of a workspace


def _start(workspace: torch.Tensor) -> torch.Tensor:
    return workspace.view(-1).view(torch.uint8)[:LOOKED_AT]


def unset(workspace: torch.Tensor) -> None:
    """What a captured call's workspace held is gone before its first replay."""
    _start(workspace).fill_(UNSET)


def reads_unset(context: OpContext, workspace: torch.Tensor | None) -> bool:
    """True if a call reads a workspace that nothing has written, under the defect; it is written afterwards."""
    if workspace is None or "unset-workspace" not in context.defects:
        return False
    start = _start(workspace)
    found = bool((start == UNSET).all())
    start.zero_()
    return found
