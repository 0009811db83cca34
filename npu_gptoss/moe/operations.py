"""What the calls of the MoE family pass, and so what every kernel of it must declare."""

from __future__ import annotations

from npu_gptoss.kernels import define_operation

WEIGHT_DTYPES = ("float32", "bfloat16")
PACKED_FORMATS = ("mxfp4", "float8_e4m3fn")

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
