"""Paged attention with sinks by torch's scaled_dot_product_attention: an example of a kernel in a package of its own.

The sink is one more key: its vector and its value are zero, and the mask, which is added to the scores, gives it the
sink's logit. The definition is `npu_gptoss/attention/reference.py`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from npu_gptoss.attention import StepMetadata
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.attention.window import keys_before
from npu_gptoss.kernels import ANY, Capability, Priority, accepts, register_kernel

ROWS = 128  # query rows at a time: the mask [heads, rows, keys + 1] of a long prompt must fit into memory


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
    """torch's scaled_dot_product_attention, request by request, the sink as a key of zeros.

    query, out: [tokens, heads, head_dim]. Caches: [blocks, block_size, kv_heads, head_dim]. sinks: [heads].
    """
    for request, seq_len in enumerate(metadata.seq_lens):
        start, end = metadata.query_start_loc[request : request + 2]
        if seq_len == 0:  # a padding row of a decode graph: its query may hold anything, its result is zero
            out[start:end] = 0
            continue
        # blocks may end in keys of nobody, NaN included: only the request's own are read. The last row is the sink's.
        blocks = metadata.block_table[request, : -(-seq_len // key_cache.shape[1])].long()
        key, value = (
            pad(cache[blocks].flatten(0, 1)[:seq_len].float(), (0, 0, 0, 0, 0, 1)).transpose(0, 1)[None]
            for cache in (key_cache, value_cache)
        )
        for first in range(start, end, ROWS):
            last = min(first + ROWS, end)
            positions = torch.arange(first, last, device=query.device) + seq_len - end
            mask = _mask(positions, seq_len, sinks, keys_before(sliding_window))
            rows = query[first:last].float().transpose(0, 1)[None]
            result = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            out[first:last] = result[0].transpose(0, 1).to(out.dtype)


def _mask(positions: torch.Tensor, seq_len: int, sinks: torch.Tensor, before: int | None) -> torch.Tensor:
    """[heads, rows, seq_len + 1], added to the scores: 0 for a visible key, -inf for a hidden one, last the sink."""
    distance = positions[:, None] - torch.arange(seq_len, device=positions.device)
    hidden = distance < 0
    if before is not None:
        hidden |= distance > before
    mask = sinks.float()[:, None, None].repeat(1, len(positions), seq_len + 1)
    mask[:, :, :seq_len] = torch.zeros_like(distance, dtype=torch.float32).masked_fill_(hidden, float("-inf"))
    return mask


def register() -> None:
    """Called through the entry point; merely importing this module, in a test of its own, registers nothing."""
    register_kernel(
        PAGED,
        solution="sdpa_example",
        capability=Capability.of("cpu"),
        signatures=(accepts(query="bfloat16", kv="bfloat16", sinks="bfloat16"),),
        traits={"head_dim": frozenset({64}), "block_size": ANY, "sliding_window": ANY},
        priority=Priority.PLUGIN,
    )(paged_attention)
