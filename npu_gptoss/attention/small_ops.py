"""Attention on plain torch ops, for any device: the served kernels on CPU, the baseline on NPU and GPU.

Rows are cut into pieces (request, row range, visible key range); pieces of equal row count are computed as one batch,
keys padded to the longest of the batch. A decode step of any number of requests is thus one batch, and a window layer
reads its window only. The index tensors of a step are built once and reused by every layer of the same window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from npu_gptoss.attention.metadata import StepMetadata
from npu_gptoss.attention.operations import KV_DTYPES, PAGED, WRITE_KV, head_stride
from npu_gptoss.attention.window import first_visible, keys_before
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel

# A piece has at most ROWS query rows and a batch of pieces at most SCORES scores per head: with 64 heads in fp32 the
# scores of a batch stay below 128 MiB however long the prompt is.
ROWS = 256
SCORES = 1 << 19


@dataclass(frozen=True)
class Piece:
    """`rows` query rows from `row` on, at positions from `position` on, over the keys [key_start, key_end)."""

    request: int
    row: int
    rows: int
    position: int
    key_start: int

    @property
    def key_end(self) -> int:
        return self.position + self.rows

    @property
    def keys(self) -> int:
        return self.key_end - self.key_start


@dataclass(frozen=True)
class Batch:
    """rows [pieces * rows] of query and out; slots [pieces, keys] into the flat cache; hidden [pieces, rows, keys]."""

    rows: torch.Tensor
    slots: torch.Tensor
    hidden: torch.Tensor


def _pieces(metadata: StepMetadata, before: int | None) -> Iterator[Piece]:
    for request, seq_len in enumerate(metadata.exact_seq_lens):
        start, end = metadata.query_start_loc[request : request + 2]
        for row in range(start, end, ROWS):
            position = seq_len - end + row
            yield Piece(request, row, min(ROWS, end - row), position, first_visible(position, before))


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Equal row counts together, similar key counts first, cut where the padded scores would exceed the budget."""
    ordered = sorted(pieces, key=lambda p: (p.rows, p.keys))
    for (rows, _), group in groupby(ordered, key=lambda p: (p.rows, p.keys == 0)):
        batch: list[Piece] = []
        for piece in group:
            if batch and (len(batch) + 1) * rows * piece.keys > SCORES:
                yield batch
                batch = []
            batch.append(piece)
        yield batch


def _plan(metadata: StepMetadata, before: int | None, block_size: int, device: torch.device) -> list[Batch]:
    plan = []
    for pieces in _batches(list(_pieces(metadata, before))):
        request, row, position, key_start, keys = (
            torch.tensor([getattr(p, name) for p in pieces], device=device)[:, None]
            for name in ("request", "row", "position", "key_start", "keys")
        )
        row_offset = torch.arange(pieces[0].rows, device=device)[None, :]
        key_offset = torch.arange(max(p.keys for p in pieces), device=device)[None, :]
        # Padding keys point at the piece's first key: any valid slot does, they are hidden from every row.
        key_at = key_start + torch.where(key_offset < keys, key_offset, 0)
        blocks = metadata.block_table.long()[request, key_at // block_size]
        query_at = (position + row_offset)[:, :, None]
        distance = query_at - (key_start + key_offset)[:, None, :]
        hidden = distance < 0  # padding keys too: by their offset they lie behind the piece's last row
        if before is not None:
            hidden |= distance > before
        plan.append(Batch((row + row_offset).flatten(), blocks * block_size + key_at % block_size, hidden))
    return plan


@register_kernel(
    PAGED,
    solution="small_ops",
    signatures=(accepts(query=KV_DTYPES, kv=KV_DTYPES, sinks=KV_DTYPES),),
    traits={"head_dim": ANY, "block_size": ANY, "sliding_window": ANY},
    priority=Priority.PORTABLE,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """Plain torch ops, batched over requests, fp32 inside."""
    heads, head_dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    before = keys_before(sliding_window)
    key = ("attention.small_ops", before, block_size)
    plans = metadata.plans
    if key not in plans:
        plans[key] = _plan(metadata, before, block_size, query.device)
    plan = plans[key]
    flat_keys, flat_values = (cache.reshape(-1, kv_heads, head_dim) for cache in (key_cache, value_cache))
    sink = sinks.float().view(1, kv_heads, group, 1, 1)
    for batch in plan:
        pieces, rows, keys = batch.hidden.shape
        if keys == 0:  # padding rows of a DecodeMetadata
            out[batch.rows] = 0
            continue
        # [pieces, kv_heads, group * rows, head_dim] times [pieces, kv_heads, head_dim, keys]
        q = query[batch.rows].float().view(pieces, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        k = flat_keys[batch.slots].float().permute(0, 2, 3, 1)
        v = flat_values[batch.slots].float().permute(0, 2, 1, 3)
        scores = (q.reshape(pieces, kv_heads, group * rows, head_dim) @ k).view(pieces, kv_heads, group, rows, keys)
        scores = (scores * scale).masked_fill_(batch.hidden[:, None, None], float("-inf"))
        largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = torch.exp(scores - largest)
        weights /= weights.sum(-1, keepdim=True) + torch.exp(sink - largest)
        result = weights.view(pieces, kv_heads, group * rows, keys) @ v
        result = result.view(pieces, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
        out[batch.rows] = result.reshape(-1, heads, head_dim).to(out.dtype)


@register_kernel(
    WRITE_KV,
    solution="small_ops",
    signatures=(accepts(key=KV_DTYPES, kv=KV_DTYPES),),
    traits={"head_dim": ANY, "block_size": ANY},
    priority=Priority.PORTABLE,
)
def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One indexed copy each."""
    # A negative slot would wrap round to the end of the cache without a word. Only the CPU can check it for free.
    if slot_mapping.device.type == "cpu" and slot_mapping.numel() and int(slot_mapping.min()) < 0:
        raise InputError(
            "slot_mapping has a negative slot for a real row; padding belongs behind metadata.num_tokens",
            field="slot_mapping",
        )
    head_stride(key_cache, value_cache)  # flattened any other would be a copy, and the new keys lost
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slot_mapping] = new.to(cache.dtype)
