"""The definition of paged attention with sinks, in fp32: compare it with the model card.

For a query at position i of a request, with head h of key/value head h // group:

    s_j = scale * <query, key_j>            for the visible keys j: max(0, i - window + 1) <= j <= i
    p_j = exp(s_j) / (exp(sink_h) + sum_k exp(s_k))
    out = sum_j p_j * value_j

The sink is one more logit in the denominator, without a value (openai/gpt-oss `gpt_oss/torch/model.py`, sdpa).
"""

from __future__ import annotations

import torch

from npu_gptoss.attention.metadata import StepMetadata
from npu_gptoss.attention.operations import FP8, KV_DTYPES, PAGED, WRITE_KV
from npu_gptoss.attention.window import keys_before
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel


def gather(cache: torch.Tensor, block_table: torch.Tensor, length: int) -> torch.Tensor:
    """[blocks, block_size, kv_heads, head_dim] -> [length, kv_heads, head_dim] of one request, in position order."""
    blocks = -(-length // cache.shape[1])
    return cache[block_table[:blocks].long()].flatten(0, 1)[:length]


@register_kernel(
    PAGED,
    solution="reference",
    signatures=(accepts(query=KV_DTYPES, kv=KV_DTYPES, sinks=KV_DTYPES),),
    traits={"head_dim": ANY, "block_size": ANY, "sliding_window": ANY},
    priority=Priority.REFERENCE,
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
    """The definition, one request at a time in fp32."""
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    before = keys_before(sliding_window)
    for request, seq_len in enumerate(metadata.exact_seq_lens):
        start, end = metadata.query_start_loc[request : request + 2]
        rows = end - start
        if rows == 0:
            continue
        key, value = (
            gather(cache, metadata.block_table[request], seq_len).float().repeat_interleave(heads // kv_heads, dim=1)
            for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key) * scale
        query_at = torch.arange(seq_len - rows, seq_len, device=query.device)[:, None]
        key_at = torch.arange(seq_len, device=query.device)[None, :]
        visible = key_at <= query_at
        if before is not None:
            visible &= key_at >= query_at - before
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = sinks.float()[:, None, None].expand(heads, rows, 1)
        probabilities = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        out[start:end] = torch.einsum("hqk,khd->qhd", probabilities, value).to(out.dtype)


@register_kernel(
    WRITE_KV,
    solution="reference",
    signatures=(accepts(key=KV_DTYPES, kv=(*KV_DTYPES, FP8)),),
    traits={"head_dim": ANY, "block_size": ANY},
    priority=Priority.REFERENCE,
)
def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Row by row. A narrow cache stores its largest number in place of a larger one."""
    block_size, largest = key_cache.shape[1], torch.finfo(key_cache.dtype).max
    key, value = (new.float().clamp(-largest, largest) for new in (key, value))
    for row, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        key_cache[block, offset] = key[row].to(key_cache.dtype)
        value_cache[block, offset] = value[row].to(value_cache.dtype)
