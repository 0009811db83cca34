"""RoPE of packed queries and keys, and the write to the cache, in one launch on a 910B.

Without it a layer on Ascend takes five launches more: three copies that part queries, keys and values, RoPE, the write.
"""

from __future__ import annotations

import torch

from npu_gptoss.dense.operations import ROTATE_WRITE
from npu_gptoss.kernels import TRITON_ASCEND, Priority, Range, accepts, register_kernel

MOST_HEADS = 96  # of queries, keys and values: gpt-oss has 80

register_kernel(
    ROTATE_WRITE,
    solution="triton_ascend",
    capability=TRITON_ASCEND,
    signatures=(accepts(qkv="bfloat16", kv="bfloat16"), accepts(qkv="float32", kv="float32")),
    traits={"head_dim": frozenset({64, 128}), "heads": Range(most=MOST_HEADS)},
    priority=Priority.SPECIALISED,
    function="npu_gptoss.dense.triton_ascend:rotate_write",
    summary="One launch: products in float32, rounded once.",
)


def packed(*parts: torch.Tensor) -> torch.Tensor:
    """The tensor [rows, width] of which these [rows, heads, head_dim] are the parts, without a copy."""
    first, width = parts[0], sum(part.shape[1] * part.shape[2] for part in parts)
    at = first.data_ptr()
    for part in parts:
        strides = (width, part.shape[2], 1)
        if part.data_ptr() != at or part.stride()[len(part) == 1 :] != strides[len(part) == 1 :]:
            raise RuntimeError(f"queries, keys and values must be parts of one tensor, got strides {part.stride()}")
        at += part.shape[1] * part.shape[2] * part.element_size()
    return first.as_strided((len(first), width), (width, 1))
