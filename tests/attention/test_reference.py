"""The definition itself, against torch's own attention with the sink as one more key: an independent formulation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from npu_gptoss.attention.reference import gather
from tests.attention.cases import HEADS, KV_HEADS, SCALE, STEPS, WINDOW, make_step
from tests.tolerances import assert_close


def with_torch(step, sliding_window):
    """scaled_dot_product_attention per request: the sink is a key of score `sink` (from the mask) and value zero."""
    out = torch.zeros_like(step.query)
    for request, keys in enumerate(step.metadata.seq_lens):
        start, end = step.metadata.query_start_loc[request : request + 2]
        table = step.metadata.block_table[request]
        k, v = (
            F.pad(gather(c, table, keys).float().repeat_interleave(HEADS // KV_HEADS, 1), (0, 0, 0, 0, 0, 1)).transpose(
                0, 1
            )
            for c in (step.key_cache, step.value_cache)
        )
        rows = end - start
        if rows == 0:
            continue
        band = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        if sliding_window is not None:
            band &= torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows - sliding_window + 1)
        mask = torch.zeros(HEADS, rows, keys + 1)
        mask[:, :, :keys].masked_fill_(~band, float("-inf"))
        mask[:, :, keys] = step.sinks.float()[:, None]
        q = step.query[start:end].float().transpose(0, 1)
        out[start:end] = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE).transpose(0, 1)
    return out


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sliding_window", [None, WINDOW, 1])
def test_definition_equals_torch_attention_with_a_sink_column(name, sliding_window):
    step = make_step(STEPS[name])
    got = step.run(sliding_window=sliding_window, kernel="reference")
    assert_close(got, with_torch(step, sliding_window))
