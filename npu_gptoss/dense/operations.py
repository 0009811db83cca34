"""What the calls of the dense family pass, and so what every kernel of it must declare.

Everything of a gpt-oss layer that is neither attention nor an expert: norms, projections, the router, and what can be
computed in the same launch. Small batches of decode are bound by launches and by the bandwidth of the weights, so the
operations are cut where a kernel can be cut, not where a formula ends.
"""

from __future__ import annotations

from npu_gptoss.kernels import define_operation

FLOATS = ("float32", "bfloat16")
FP8 = "float8_e4m3fn"
WEIGHTS = (*FLOATS, FP8)

QKV = define_operation(
    "dense",
    "qkv",
    roles=("hidden", "weight", "kv"),
    traits=("rows", "head_dim"),
    summary="residual add, RMSNorm, the three input projections with bias, RoPE, and the write to the paged cache",
)
OUTPUT = define_operation(
    "dense",
    "output",
    roles=("hidden", "weight"),
    traits=("rows",),
    summary="attention's output projection with bias, and the residual add",
)
ROUTER = define_operation(
    "dense",
    "router",
    roles=("hidden", "weight"),
    traits=("rows",),
    summary="residual add, RMSNorm, router logits, top-k and the softmax over the k",
)
ADD_NORM = define_operation("dense", "add_norm", roles=("hidden",), traits=(), summary="residual add and RMSNorm")
LOGITS = define_operation(
    "dense", "logits", roles=("hidden", "weight"), traits=("rows",), summary="the vocabulary's logits of normed rows"
)
GREEDY = define_operation(
    "dense", "greedy", roles=("logits",), traits=(), summary="the largest logit of each row, if all are finite"
)
