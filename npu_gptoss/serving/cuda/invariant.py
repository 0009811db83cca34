"""VLLM_BATCH_INVARIANT=1: each request's bits are those that it has alone, in any batch, chunk or prefix hit.

Every operation has one kernel for all numbers of rows, in which no sum depends on the other rows. Projections are
cuBLAS's, from which vLLM takes the split of long sums. Attention reads whole tiles of keys at fixed positions, for
single rows as for prompts; so the host must know its lengths, and graphs break off at it.
"""

from __future__ import annotations

import os

from npu_gptoss.attention.operations import PAGED
from npu_gptoss.dense.operations import LOGITS, OUTPUT, QKV, ROUTER, TOKEN
from npu_gptoss.kernels import Operation
from npu_gptoss.kernels.selection import override_variable
from npu_gptoss.moe.operations import EXPERTS

KERNELS: dict[Operation, str] = {
    QKV: "triton",
    OUTPUT: "small_ops",
    ROUTER: "triton_norm",
    LOGITS: "small_ops",
    TOKEN: "small_ops",
    EXPERTS: "triton_many",
    PAGED: "triton_invariant",
}


def hold() -> None:
    """Sets these kernels for this process, as the user's variables do."""
    for operation, kernel in KERNELS.items():
        os.environ[override_variable(operation)] = f"{operation.name}.{kernel}"
