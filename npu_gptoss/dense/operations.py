"""Roles and traits of the dense family's calls, which every kernel must declare.

A gpt-oss layer without attention and experts: norms, projections, the router, and operations of the same
launch. Small batches of decode are bound by launches and by the bandwidth of the weights, so the
operations are cut where a kernel can be cut, not where a formula ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npu_gptoss.kernels import Described, Operation, define_operation, signature

FLOATS = ("float32", "bfloat16")
# The sizes that choose a program: rows of the call; aligned, whether the weight's rows begin at multiples of
# 16 bytes; of the router experts, hidden_size, and logits = rows * experts.

QKV = define_operation(
    "dense",
    "qkv",
    roles=("hidden", "weight", "kv"),
    traits=("head_dim",),
    sizes=("rows", "aligned"),
    summary="residual add, RMSNorm, the three input projections with bias, RoPE, and the write to the paged cache",
)
ROTATE_WRITE = define_operation(
    "dense",
    "rotate_write",
    roles=("qkv", "kv"),
    traits=("head_dim",),
    sizes=("heads",),  # of queries, keys and values together
    summary="RoPE of packed queries and keys, and the write of keys and values to the paged cache",
)
OUTPUT = define_operation(
    "dense",
    "output",
    roles=("hidden", "weight"),
    sizes=("rows", "aligned"),
    summary="attention's output projection with bias, and the residual add",
)
ROUTER = define_operation(
    "dense",
    "router",
    roles=("hidden", "weight"),
    sizes=("rows", "experts", "hidden_size", "logits", "aligned"),
    summary="residual add, RMSNorm, router logits, top-k and the softmax over the k",
)
ADD_NORM = define_operation("dense", "add_norm", roles=("hidden",), summary="residual add and RMSNorm")
LOGITS = define_operation(
    "dense",
    "logits",
    roles=("hidden", "weight"),
    sizes=("rows", "aligned"),
    summary="the vocabulary's logits of normed rows",
)
GREEDY = define_operation(
    "dense", "greedy", roles=("logits",), summary="the largest logit of each row, unless one is damaged"
)
TOKEN = define_operation(
    "dense",
    "token",
    roles=("hidden", "weight"),
    sizes=("rows", "aligned"),
    summary="the token of the largest logit, with noise where it is drawn, of normed rows",
)


def aligned(weight: torch.Tensor) -> bool:
    """True when the tensor memory accelerator of a GPU takes the matrix."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] * weight.element_size() % 16 == 0


def qkv_call(rows: int, hidden: torch.dtype, weight: torch.Tensor, kv: torch.dtype, head_dim: int) -> Described:
    """Describes a call of dense.qkv."""
    traits = {"rows": rows, "head_dim": head_dim, "aligned": aligned(weight)}
    return signature(hidden=hidden, weight=weight.dtype, kv=kv), traits


def rotate_write_call(qkv: torch.dtype, heads: int, kv: torch.dtype, head_dim: int) -> Described:
    return signature(qkv=qkv, kv=kv), {"heads": heads, "head_dim": head_dim}


def output_call(rows: int, hidden: torch.dtype, weight: torch.Tensor) -> Described:
    return signature(hidden=hidden, weight=weight.dtype), {"rows": rows, "aligned": aligned(weight)}


def router_call(rows: int, hidden: torch.dtype, weight: torch.Tensor) -> Described:
    experts, inputs = weight.shape
    sizes = {"experts": experts, "hidden_size": inputs, "logits": rows * experts}
    return signature(hidden=hidden, weight=weight.dtype), {"rows": rows, **sizes, "aligned": aligned(weight)}


# of each operation, from the rows of a call and what else describes it
CALLS: dict[Operation, Callable[..., Described]] = {
    QKV: qkv_call,
    ROTATE_WRITE: lambda _, *sizes: rotate_write_call(*sizes),
    **dict.fromkeys((OUTPUT, LOGITS, TOKEN), output_call),
    ROUTER: router_call,
    ADD_NORM: lambda _, hidden: (signature(hidden=hidden), {}),
    GREEDY: lambda _, logits: (signature(logits=logits), {}),
}
