"""The mathematics of npu_fused_infer_attention_score, one request at a time.

Per query row of head h: scores s = scale * q.k in float32, m their maximum (without the sink), p = exp(s - m) rounded
to the query's dtype before it multiplies the values, denominator sum(p) + exp(sink[h] - m) from the unrounded p and the
unscaled sink. log-sum-exp omits the sink on CANN 8.3 and includes it from 8.5. A row without visible keys gives 0 and
an infinite log-sum-exp.
"""

from __future__ import annotations

import torch
from ascend_emulator.context import OpContext
from ascend_emulator.ops import fia_defects
from ascend_emulator.ops.fia_call import COMPRESSED_MODES, TND_LAYOUTS, FiaCall, Plan
from ascend_emulator.ops.fia_mask import Tiling, band, is_strict_triangle, read_as_hardware_does
from ascend_emulator.ops.table import poisoned, shape
from ascend_emulator.rules import Call, NotEmulatedError

NO_ROW = float("inf")  # 3e99 in float32


def outputs(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten outputs as the binding allocates them; without want_lse the second is empty."""
    query = plan.call.query
    lse = plan.lse_shape if plan.call.want_lse else (0,)
    return poisoned(plan.out_shape, query), poisoned(lse, query, torch.float32)


def run(call: Call, plan: Plan, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes `out` and, when wanted, `lse`."""
    fia = plan.call
    if fia.query_rope is not None:
        raise NotEmulatedError(f"{call.op}: the emulator has no split rope (query_rope {shape(fia.query_rope)})")
    reader = _MaskReader(call, plan)
    tnd = fia.layout in TND_LAYOUTS
    queries, target = (fia.query, out) if tnd else (_batch_view(fia.query, plan), _batch_view(out, plan))
    if fia.layout == "NTD_TND":
        queries = queries.transpose(0, 1)
    sink = None if fia.sink is None or fia.sink.numel() == 0 else fia.sink.float()
    merged = bool(call.context.defects) and fia_defects.merges_heads(plan, call.context)
    for index, (start, q_len, kv_len) in enumerate(plan.requests):
        rows = slice(start, start + q_len) if tnd else slice(0, q_len)
        source = queries if tnd else queries[start]
        into = target if tnd else target[start]
        if not tnd:
            into.zero_()
        if q_len == 0:
            continue
        key, value = _keys(call, plan, index, start, kv_len)
        if key is None:
            continue  # a block id outside the cache: the rows stay poisoned
        visible = reader.visible(index, q_len, kv_len)
        if merged:
            into[rows] = fia_defects.merged_heads(source[rows], key, value, visible, fia.scale, sink, call.context).to(
                out.dtype
            )
            continue
        counted, left = (
            fia_defects.spoil_sums(plan, call.context, index, q_len, kv_len, sink)
            if call.context.defects
            else (sink, None)
        )
        result, row_lse = attend(
            source[rows],
            key,
            value,
            visible,
            fia.scale,
            counted,
            call.context,
            left,
            sink_in_lse=not call.context.is_8_3,
        )
        into[rows] = result.to(out.dtype)
        if fia.want_lse:
            if tnd:
                lse[rows, :, 0] = row_lse
            else:
                lse[start].fill_(NO_ROW)
                lse[start, :, rows, 0] = row_lse.T


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    sink: torch.Tensor | None,
    context: OpContext,
    left: torch.Tensor | None = None,
    *,
    sink_in_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [q, N, D], key [kv, N_kv, D], value [kv, N_kv, D_v], visible [q, kv] -> [q, N, D_v] and [q, N], float32.

    left: [q, 1], added to the denominators by a defect.
    """
    q_len, heads, dim = query.shape
    kv_heads = value.size(1)
    if key.size(0) == 0:
        return query.new_zeros(q_len, heads, value.size(2), dtype=torch.float32), torch.full((q_len, heads), NO_ROW)
    grouped = query.float().reshape(q_len, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key.float()).mul_(scale)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    blind = torch.isneginf(peak)
    peak.masked_fill_(blind, 0.0)
    p = scores.sub_(peak).exp_()
    total = p.sum(-1, keepdim=True)
    if left is not None:
        total = total + left
    full = total
    if sink is not None:
        full = total + torch.exp(sink.reshape(kv_heads, -1, 1, 1) - peak)
    weighted = torch.einsum("hgqk,khd->hgqd", context.rounded(p, query.dtype).float(), value.float())
    out = (weighted / full).masked_fill_(blind, 0.0)
    lse = (peak + torch.log(full if sink_in_lse else total)).masked_fill_(blind, NO_ROW)
    return out.permute(2, 0, 1, 3).reshape(q_len, heads, -1), lse[..., 0].permute(2, 0, 1).reshape(q_len, heads)


def _batch_view(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """[B, S, N, D] of a BSH, BSND or BNSD tensor."""
    layout = plan.call.layout
    if layout == "BSH":
        return tensor.view(tensor.size(0), tensor.size(1), plan.heads, -1)
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


def _keys(
    call: Call, plan: Plan, index: int, start: int, kv_len: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Keys and values [kv_len, N_kv, D] of one request; (None, None) if a block id is outside the cache."""
    fia = plan.call
    if fia.paged:
        blocks = fia.block_table[index, : -(-kv_len // fia.block_size)].long()
        if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= fia.key.size(0)):
            call.undefined(
                33, f"request {index} reads blocks {blocks.tolist()}, expected ids from 0 to {fia.key.size(0) - 1}"
            )
            return None, None
        return tuple(_pages(cache, blocks, plan.kv_heads)[:kv_len] for cache in (fia.key, fia.value))
    if fia.layout in TND_LAYOUTS:
        before = sum(n for _, _, n in plan.requests[:index])
        rows = slice(before, before + kv_len)
        pair = (fia.key, fia.value)
        return tuple(t[rows] if fia.layout == "TND" else t[:, rows].transpose(0, 1) for t in pair)
    views = []
    for tensor in (fia.key, fia.value):
        one = tensor[start]
        if fia.layout == "BSH":
            one = one.reshape(one.size(0), plan.kv_heads, -1)
        views.append((one.transpose(0, 1) if fia.layout == "BNSD" else one)[:kv_len])
    return tuple(views)


def _pages(cache: torch.Tensor, blocks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The given blocks in order, [tokens, N_kv, D], from any of the three cache shapes."""
    pages = cache[blocks]
    if cache.dim() == 3:
        return pages.reshape(-1, kv_heads, cache.size(2) // kv_heads)
    if cache.dim() == 4:
        return pages.transpose(1, 2).reshape(-1, kv_heads, cache.size(3))
    return pages.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, cache.size(2) * 16)


class _MaskReader:
    """Visibility per request; the mask is inspected once per call."""

    def __init__(self, call: Call, plan: Plan) -> None:
        fia = plan.call
        self.fia = fia
        self.plain = True
        self.tiling: Tiling | None = None
        if fia.mask is None or fia.sparse_mode not in COMPRESSED_MODES or fia.sparse_mode == 2:
            return
        self.plain = is_strict_triangle(fia.mask)
        if self.plain:
            return
        call.undefined(
            24,
            f"atten_mask {shape(fia.mask)} for sparse_mode {fia.sparse_mode} should hold ones strictly above the "
            "diagonal "
            "and zeros elsewhere; it is read in shifted tiles, so other contents mask other keys than they seem to",
        )
        q_lens, kv_lens = ([r[i] for r in plan.requests] for i in (1, 2))
        self.tiling = Tiling.of(q_lens, kv_lens, plan.heads // plan.kv_heads, fia.want_lse)

    def visible(self, index: int, q_len: int, kv_len: int) -> torch.Tensor | None:
        fia = self.fia
        if fia.layout not in TND_LAYOUTS:
            return self._batched(index, q_len, kv_len)
        if fia.sparse_mode == 0:
            return None
        if not self.plain:
            return read_as_hardware_does(
                fia.mask, q_len, kv_len, fia.sparse_mode, fia.pre_tokens, fia.next_tokens, self.tiling
            )
        pre, next_ = (kv_len, 0) if fia.sparse_mode == 3 else (fia.pre_tokens, fia.next_tokens)
        if q_len == 1 and pre + 1 >= kv_len and next_ >= 0:
            return None
        return band(q_len, kv_len, pre, next_)

    def _batched(self, index: int, q_len: int, kv_len: int) -> torch.Tensor | None:
        fia = self.fia
        rows = fia.query.size(2 if fia.layout == "BNSD" else 1)
        if rows == 1:
            return self._decode(index, kv_len)
        if fia.sparse_mode == 2:
            return band(q_len, q_len, kv_len, 0)[:, :1].new_ones(q_len, kv_len).tril_()
        if fia.sparse_mode in (3, 4):
            pre, next_ = (kv_len, 0) if fia.sparse_mode == 3 else (fia.pre_tokens, fia.next_tokens)
            return band(q_len, kv_len, pre, next_)
        return self._full_mask(index, q_len, kv_len)

    def _decode(self, index: int, kv_len: int) -> torch.Tensor | None:
        """One query row outside TND: only paged BSH knows a window, and counts keys in pre_tokens."""
        fia = self.fia
        if fia.sparse_mode in (0, 1) and fia.mask is not None:
            return self._full_mask(index, 1, kv_len)
        if fia.layout == "BSH" and fia.paged and 0 < fia.pre_tokens < kv_len:
            return torch.arange(kv_len)[None] >= kv_len - fia.pre_tokens
        return None

    def _full_mask(self, index: int, q_len: int, kv_len: int) -> torch.Tensor | None:
        mask = self.fia.mask
        if mask is None:
            return None
        plain = mask.reshape(-1, mask.size(-2), mask.size(-1))
        return plain[index if plain.size(0) > 1 else 0, :q_len, :kv_len] == 0


def check_out(call: Call, fia: FiaCall, plan: Plan, out: torch.Tensor, lse: torch.Tensor) -> None:
    call.require(
        list(out.shape) == list(plan.out_shape) and out.dtype == fia.query.dtype and out.is_contiguous(),
        39,
        f"attention_out should be contiguous {list(plan.out_shape)} of {fia.query.dtype}, got {shape(out)} of "
        f"{out.dtype}",
    )
    if fia.want_lse:
        call.require(
            list(lse.shape) == list(plan.lse_shape) and lse.dtype == torch.float32,
            39,
            f"softmax_lse should be {list(plan.lse_shape)} of torch.float32, got {shape(lse)} of {lse.dtype}",
        )
