"""What the calls of the MoE family pass, and so what every kernel of it must declare."""

from __future__ import annotations

from npu_gptoss.kernels import define_operation

WEIGHT_DTYPES = ("float32", "bfloat16")
PACKED_FORMATS = ("mxfp4", "float8_e4m3fn")

# Trait `rows`: how many tokens a call has, in the classes that decide which kernel is best.
ONE, FEW, MANY = "one", "few", "many"
ROW_CLASSES = (ONE, FEW, MANY)
FEW_ROWS = 256


def row_class(rows: int) -> str:
    """The trait `rows` of a call: a single decode row, a decode batch, or a prefill."""
    return ONE if rows == 1 else FEW if rows <= FEW_ROWS else MANY


ROUTE = define_operation(
    "moe",
    "route",
    roles=("logits",),
    traits=(),
    summary="top-k of the router logits, softmax over the k in fp32",
)
EXPERTS = define_operation(
    "moe",
    "experts",
    roles=("hidden", "weight"),
    traits=("activation", "expert_parallel", "rows"),
    summary="the routed experts' MLPs with biases and the clamped SwiGLU, summed by routing weight",
)
