"""Attention on an Ascend 910B: one fused call for prefill, chunk and decode rows alike.

`npu_fused_infer_attention_score_v2` in TND layout over the paged cache, with `learnable_sink`. Behind it are two
kernels, one up to CANN 8.3 and one from 8.5 on. Requirements of both (from their tiling code of 8.3, 8.5, 9.0 and
9.1; no hardware has confirmed our reading):

* host lists: query lengths cumulative and ending at the number of rows, key lengths per request (paged);
* the cache as [blocks, block_size, kv_heads * head_dim], block size a multiple of 128; a block table of exactly the
  batch's rows;
* at most 4096 requests, and no more blocks in all requests together than the cache has, shared ones counted each time;
* a compressed causal mask of 2048 x 2048, strict upper triangle set, for every length;
* sparse_mode 3 attends all keys up to the query's own; mode 4 those from `pre_tokens` before it, its own not counted,
  so that a window of 128 keys is pre_tokens = 127;
* bfloat16 throughout, sinks included: from CANN 9.0 on a float16 sink would be taken, by another kernel, which has
  defects that this one has not (ops-transformer 6f45a9b62); sinks have memory behind them (`padding.with_slack`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from npu_gptoss.attention.metadata import AttentionMetadata
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.attention.padding import unpad
from npu_gptoss.attention.window import keys_before
from npu_gptoss.kernels import ANY, ASCEND, EMULATED_FP32, Priority, accepts, register_kernel

HEAD_DIMS = frozenset({64, 128})
BLOCK_SIZES = frozenset(range(128, 1025, 128))

MASK_SIZE = 2048
MAX_REQUESTS = 4096
MERGED_TILE = 512  # keys
SPARSE_CAUSAL, SPARSE_BAND = 3, 4
UNLIMITED = 2**31 - 1


_heads_apart = False  # see keep_heads_apart


def keep_heads_apart() -> None:
    """Keeps decode calls from merging the heads of a group: CANN 8.3 does that wrongly above 512 keys.

    The kernel merges them when every request has one row and no log-sum-exp is asked for (ops-transformer,
    prompt_flash_attention_tiling.cpp, `allSeqLenEqualOne`). One more request, of two rows, switches it off; so would
    the log-sum-exp, whose barrier may hang on 8.3 (2f93a0d1f).
    """
    global _heads_apart
    _heads_apart = True


def heads_kept_apart() -> bool:
    return _heads_apart


@functools.cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """[2048, 2048] int8, 1 where a key is hidden. One a device, made at load: inside a capture it could not be made."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu_(1).to(device)


@dataclass(frozen=True)
class Part:
    """Requests that go into one call, with both lists as the operator takes them.

    requests, rows: which ones of the step, and which rows of query and out are theirs.
    query_ends: [requests] the row after each request's last, from the part's first row on.
    seq_lens: [requests] keys of each.
    """

    requests: slice
    rows: slice
    query_ends: list[int]
    seq_lens: list[int]


def parts(metadata: AttentionMetadata, num_blocks: int, block_size: int) -> list[Part]:
    """The step's requests in as few calls as the operator allows: one, unless a shared prefix is counted too often."""
    free = num_blocks - _heads_apart  # the request of two rows reads a block, too
    key = ("attention.ascend", free, block_size)
    plans = metadata.plans  # a DecodeMetadata gives an empty one each time
    if key not in plans:
        lengths = metadata.exact_seq_lens
        needed = [-(-length // block_size) for length in lengths]
        cuts, blocks = [0], 0
        for request, more in enumerate(needed):
            if blocks + more > free or request - cuts[-1] == MAX_REQUESTS - _heads_apart:
                cuts.append(request)
                blocks = 0
            blocks += more
        cuts.append(len(needed))
        start = metadata.query_start_loc
        plans[key] = [
            Part(
                slice(first, last),
                slice(start[first], start[last]),
                [end - start[first] for end in start[first + 1 : last + 1]],
                list(lengths[first:last]),
            )
            for first, last in pairwise(cuts)
            if start[last] > start[first]
        ]
    return plans[key]


def call_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_ends: list[int],
    seq_lens: list[int],
    block_table: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Arguments of npu_fused_infer_attention_score_v2, of its `.out` form and of its workspace query."""
    before = keys_before(sliding_window)
    return {
        "query": query,
        "key": key_cache.flatten(2),
        "value": value_cache.flatten(2),
        "atten_mask": causal_mask(query.device),
        "actual_seq_qlen": query_ends,
        "actual_seq_kvlen": seq_lens,
        "block_table": block_table,
        "learnable_sink": sinks,
        "num_query_heads": query.shape[1],
        "num_key_value_heads": key_cache.shape[2],
        "softmax_scale": scale,
        "pre_tokens": UNLIMITED if before is None else before,
        "next_tokens": 0,
        "input_layout": "TND",
        "sparse_mode": SPARSE_CAUSAL if before is None else SPARSE_BAND,
        "block_size": key_cache.shape[1],
    }


@functools.cache
def no_lse(device: torch.device) -> torch.Tensor:
    """[1] float32, the second output of `.out`, which is not written unless asked for. One a device, as the mask."""
    return torch.empty(1, dtype=torch.float32, device=device)


@register_kernel(
    PAGED,
    solution="ascend",
    capability=ASCEND,
    signatures=(
        accepts(query="bfloat16", kv="bfloat16", sinks="bfloat16"),
        accepts(query="float32", kv="float32", sinks="float32", needs=EMULATED_FP32),
    ),
    traits={"head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "sliding_window": ANY},
    priority=Priority.PERFORMANT,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """npu_fused_infer_attention_score_v2 with learnable_sink, written straight into the caller's buffer."""
    import torch_npu

    lse = no_lse(query.device)
    for part in parts(metadata, *key_cache.shape[:2]):
        # a part of all requests, as good as always, takes everything as it is: slices cost the host time in each layer
        rows, written, blocks = (
            (query, out, unpad(metadata.block_table, metadata.num_requests, "block_table"))
            if len(part.seq_lens) == metadata.num_requests
            else (query[part.rows], out[part.rows], metadata.block_table[part.requests])
        )
        query_ends, seq_lens, target = part.query_ends, part.seq_lens, written
        if _heads_apart and _merges_wrongly(part, sliding_window):
            rows, blocks = torch.cat([rows, rows[:1], rows[:1]]), torch.cat([blocks, blocks[:1]])
            query_ends, seq_lens = [*query_ends, query_ends[-1] + 2], [*seq_lens, 2]
            target = torch.empty_like(rows)
        arguments = call_arguments(
            rows, key_cache, value_cache, query_ends=query_ends, seq_lens=seq_lens, block_table=blocks, sinks=sinks,
            scale=scale, sliding_window=sliding_window,
        )  # fmt: skip
        torch_npu.npu_fused_infer_attention_score_v2.out(**arguments, out=[target, lse])
        if target is not written:
            written.copy_(target[:-2])


def _merges_wrongly(part: Part, sliding_window: int | None) -> bool:
    """A window lies in one tile of 512 keys, and a short context too."""
    return sliding_window is None and len(part.seq_lens) == part.query_ends[-1] and max(part.seq_lens) > MERGED_TILE


@register_kernel(
    WRITE_KV,
    solution="ascend",
    capability=ASCEND,
    signatures=(accepts(key="bfloat16", kv="bfloat16"), accepts(key="float32", kv="float32", needs=EMULATED_FP32)),
    traits={"head_dim": ANY, "block_size": ANY},
    priority=Priority.PERFORMANT,
)
def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """_npu_reshape_and_cache. It takes int32 slots: a step's mapping comes as such, or costs a cast in each layer."""
    import torch_npu

    torch_npu._npu_reshape_and_cache(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_indices=slot_mapping.to(torch.int32)
    )
