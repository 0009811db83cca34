"""Prints the behaviour of vllm-ascend 0.11.0 that four diffs of `patches/` change, on the emulated 910B, as JSON.

A function for each diff, named like it. The other two diffs of 0.11.0 are seen by serving (test_patches.py).
"""

from __future__ import annotations

import json
import types
from typing import Any

import torch

HEAD_DIM = 64


def decode_query_list() -> dict[str, Any]:
    """Three decoding requests in a step that is padded to five rows."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder, AscendAttentionState

    common = types.SimpleNamespace(
        num_reqs=3,
        num_actual_tokens=3,
        num_input_tokens=5,
        query_start_loc_cpu=torch.arange(4, dtype=torch.int32),
        seq_lens_cpu=torch.tensor([5, 6, 7], dtype=torch.int32),
        block_table_tensor=torch.arange(3, dtype=torch.int32).view(3, 1).npu(),
        slot_mapping=torch.tensor([4, 133, 262], dtype=torch.int32).npu(),
        attn_mask=torch.triu(torch.ones(2048, 2048), diagonal=1).to(torch.int8).npu(),
        attn_state=AscendAttentionState.DecodeOnly,
        max_query_len=1,
        enable_dbo_across_dp=False,
    )
    builder = object.__new__(AscendAttentionMetadataBuilder)
    builder.device = torch.device("npu:0")
    built = builder.build(common_prefix_len=0, common_attn_metadata=common)
    return {"query ends": built.actual_seq_lengths_q, "key lengths": built.seq_lens_list}


def rotary(**changes: Any) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.ops.rotary_embedding import AscendYaRNRotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.bfloat16)
        try:
            sizes = (HEAD_DIM, HEAD_DIM, 4096, 150000.0, True, 32.0, torch.float32)
            return AscendYaRNRotaryEmbedding(*sizes, beta_fast=32.0, beta_slow=1.0, **changes)
        finally:
            torch.set_default_dtype(torch.float32)


def rope_buffer() -> dict[str, Any]:
    """Rotates bfloat16 by a table that was asked for in float32."""
    from vllm_ascend.ops.rotary_embedding import _rope_forward_oot

    layer = rotary().npu()
    buffer = layer.cos_sin_cache
    query = torch.randn(3, HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = torch.tensor([0, 7, 4000])
    cos, sin = buffer.cpu().float()[positions].chunk(2, dim=-1)
    first, second = query.float().chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rotated, _ = _rope_forward_oot(layer, positions.npu(), query.npu(), query.npu(), True)
    difference = (rotated.float().cpu() - expected).abs().max()
    return {
        "right": bool(difference <= 2e-2 * (1 + expected.abs().max())),
        "buffer replaced in forward": layer.cos_sin_cache is not buffer,
    }


def yarn_truncate() -> list[bool]:
    """The argument's way to vLLM's class, which gets a constructor that takes it."""
    from vllm.model_executor.layers.rotary_embedding import YaRNScalingRotaryEmbedding

    stock, taken = YaRNScalingRotaryEmbedding.__init__, []

    def __init__(self: Any, *args: Any, truncate: bool = True, **kwargs: Any) -> None:
        taken.append(truncate)
        stock(self, *args, **kwargs)

    YaRNScalingRotaryEmbedding.__init__ = __init__
    rotary(truncate=False)
    rotary()
    return taken


def quantization_claim() -> dict[str, Any]:
    from vllm_ascend.quantization.quant_config import AscendQuantConfig

    claim = AscendQuantConfig.override_quantization_method
    return {
        "mxfp4": claim({"quant_method": "mxfp4"}, None),
        "mxfp4, with --quantization ascend": claim({"quant_method": "mxfp4"}, "ascend"),
        "ascend": claim({"quant_method": "ascend"}, None),
        "no method named": claim({}, None),
    }


if __name__ == "__main__":
    seen = {see.__name__: see() for see in (decode_query_list, rope_buffer, yarn_truncate, quantization_claim)}
    print(json.dumps(seen))
