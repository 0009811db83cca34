"""RoPE of packed queries and keys, and the write to the cache, in one launch on a 910B.

Without it a layer on Ascend takes five launches more: three copies that part queries, keys and values, RoPE, the write.
"""

from __future__ import annotations

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
