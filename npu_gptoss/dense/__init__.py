"""The public ops of a layer besides attention and experts: norms, projections, router, logits.

`reference.py` defines them; the other modules are solutions. The operations are cut for decode, where every launch
counts: the next reader of a sum adds the residual. `delta` is still to be added to `residual`; None:
nothing. Each op returns the new residual, a separate float32 tensor, or the old one where nothing was added: the
stream of a bfloat16 model is not rounded between its layers. Inputs and outputs of a product have its weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_gptoss.attention import StepMetadata
from npu_gptoss.dense import ascend, reference, small_ops, triton  # noqa: F401  (registers their kernels)
from npu_gptoss.dense.operations import ADD_NORM, CALLS, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN
from npu_gptoss.dense.shortlist import Shortlist
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound, Operation, bind, chosen, expect

__all__ = [
    "Shortlist",
    "add_norm",
    "bound",
    "greedy",
    "logits",
    "output",
    "qkv",
    "rotate_write",
    "router",
    "token",
]

Kernel = Bound | str | None


def bound(operation: Operation, *described: Any) -> Bound:
    """The kernels of a layer's operation. described: the arguments of its `operations.CALLS` behind the rows."""
    return bind(operation, lambda rows: CALLS[operation](rows, *described))


def _chosen(operation: Operation, kernel: Kernel, rows: int, *described: Any) -> Callable[..., Any]:
    return chosen(operation, kernel, rows, lambda rows: CALLS[operation](rows, *described))


def _check_rows(residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor) -> None:
    expect("residual", residual, len(residual), residual.shape[-1])
    expect("norm_weight", norm_weight, residual.shape[1], dtype=torch.float32)
    if delta is not None:
        expect("delta", delta, *residual.shape)


def _check_weight(weight: torch.Tensor, inputs: int, bias: torch.Tensor | None = None) -> None:
    expect("weight", weight, len(weight), inputs)
    if bias is not None:
        expect("bias", bias, len(weight))


def _check_heads(width: int, key_cache: torch.Tensor, value_cache: torch.Tensor, name: str) -> int:
    """Returns head_dim. width: of packed queries, keys and values."""
    if key_cache.dim() != 4:
        expect("key_cache", key_cache, "blocks", "block_size", "kv_heads", "head_dim")
    expect("value_cache", value_cache, *key_cache.shape)
    kv_heads, head_dim = key_cache.shape[2:]
    heads, rest = divmod(width - 2 * kv_heads * head_dim, head_dim)
    if heads < 1 or rest:
        raise InputError(
            f"{name} is {width} wide, which is no number of query heads of {head_dim} "
            f"with {kv_heads} key and value heads",
            field=name,
        )
    return head_dim


def qkv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    *,
    kernel: Kernel = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes turned queries of the residual stream; stores the turned keys, and the values, in the cache.

    residual, delta: [rows, hidden]; rows past `metadata.num_tokens` are padding, whose keys are not stored.
    weight: [(heads + 2 * kv_heads) * head_dim, hidden], rows of q, then k, then v; bias alike.
    cos_sin: [positions, head_dim] float32: cosines, then sines; positions: [rows] int64.
    Caches: [blocks, block_size, kv_heads, head_dim], written in place at `metadata.slot_mapping`.
    kernel: the layer's kernels (`bound`), or the name of a kernel or solution, to override the selection;
        so for every op below.

    Returns the new residual and the queries [rows, heads, head_dim].
    """
    _check_rows(residual, delta, norm_weight)
    _check_weight(weight, residual.shape[1], bias)
    head_dim = _check_heads(weight.shape[0], key_cache, value_cache, "weight")
    expect("positions", positions, len(residual))
    run = _chosen(QKV, kernel, len(residual), weight.dtype, weight, key_cache.dtype, head_dim)
    return run(
        residual=residual, delta=delta, norm_weight=norm_weight, eps=eps, weight=weight, bias=bias, cos_sin=cos_sin,
        positions=positions, key_cache=key_cache, value_cache=value_cache, metadata=metadata,
    )  # fmt: skip


def rotate_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    *,
    kernel: Kernel = None,
) -> torch.Tensor:
    """The end of `qkv`, from the packed projections on: turned queries [rows, heads, head_dim].

    qkv: [rows, (heads + 2 * kv_heads) * head_dim]. Keys and values of negative slots are not stored, nor those of rows
    past `metadata.num_tokens`, whose queries may be anything.
    cos_sin: [positions, head_dim], cosines, then sines; positions: [>= rows] int64.
    """
    head_dim = _check_heads(qkv.shape[1], key_cache, value_cache, "qkv")
    tokens = metadata.num_tokens
    if min(len(positions), len(metadata.slot_mapping), len(qkv)) < tokens:
        raise InputError(
            f"{tokens} tokens need as many rows, positions and slots, got {len(qkv)}, {len(positions)} and "
            f"{len(metadata.slot_mapping)}",
            field="positions",
        )
    query = qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * key_cache.shape[2], head_dim)
    if tokens:
        run = _chosen(ROTATE_WRITE, kernel, 0, qkv.dtype, qkv.shape[1] // head_dim, key_cache.dtype, head_dim)
        run(
            qkv=qkv[:tokens], cos_sin=cos_sin, positions=positions, key_cache=key_cache, value_cache=value_cache,
            slot_mapping=metadata.slot_mapping, query=query[:tokens],
        )  # fmt: skip
    return query


def output(
    attended: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    kernel: Kernel = None,
) -> torch.Tensor:
    """attended [rows, in] @ weight [hidden, in].T + bias, and + residual [rows, hidden] in float32 where given.

    Without residual it is one rank's share, to be summed over the ranks first.
    """
    _check_weight(weight, attended.shape[-1], bias)
    if residual is not None:
        expect("residual", residual, len(attended), len(weight))
    run = _chosen(OUTPUT, kernel, len(attended), attended.dtype, weight)
    return run(attended=attended, weight=weight, bias=bias, residual=residual)


def router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    live: torch.Tensor | None = None,
    kernel: Kernel = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of each row, and the normed row that they read.

    residual, delta: [rows, hidden]; weight: [experts, hidden]; bias: [experts].
    live: [rows], 0 marks a padding row: its ids are -1, so that no expert is read for it, its weights 0.

    Returns the new residual, the normed rows [rows, hidden], weights [rows, top_k] float32 and ids [rows, top_k]
    int32 or int64, largest logit first.
    """
    _check_rows(residual, delta, norm_weight)
    _check_weight(weight, residual.shape[1], bias)
    if not 1 <= top_k <= weight.shape[0]:
        raise InputError(f"top_k must be 1 to {weight.shape[0]} (the experts), got {top_k}", field="top_k")
    if live is not None:
        expect("live", live, len(residual))
    run = _chosen(ROUTER, kernel, len(residual), weight.dtype, weight)
    return run(
        residual=residual, delta=delta, norm_weight=norm_weight, eps=eps, weight=weight, bias=bias, top_k=top_k,
        live=live,
    )  # fmt: skip


def add_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    kernel: Kernel = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual, delta [rows, hidden] -> the new residual and its RMSNorm in `dtype`, both [rows, hidden]."""
    _check_rows(residual, delta, norm_weight)
    run = _chosen(ADD_NORM, kernel, len(residual), dtype)
    return run(residual=residual, delta=delta, norm_weight=norm_weight, eps=eps, dtype=dtype)


def logits(
    normed: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, kernel: Kernel = None
) -> torch.Tensor:
    """normed [rows, hidden] @ weight [vocab, hidden].T -> [rows, vocab] in normed's dtype, into `out` where given."""
    _check_weight(weight, normed.shape[-1])
    if out is None:
        out = torch.empty(normed.shape[0], weight.shape[0], dtype=normed.dtype, device=normed.device)
    expect("out", out, len(normed), len(weight), dtype=normed.dtype)
    if not out.is_contiguous():
        raise InputError(f"out must be contiguous, got strides {out.stride()}", field="out")
    run = _chosen(LOGITS, kernel, len(normed), normed.dtype, weight)
    run(normed=normed, weight=weight, out=out)
    return out


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None, kernel: Kernel = None) -> torch.Tensor:
    """logits [rows, vocab] -> ids [rows] int64 of the largest, into `out` where given.

    -1 for a row that holds NaN or infinity: sampling from that would be silent garbage. Minus infinity is a token that
    is not allowed, by a grammar for example; a row of nothing else is -1 too.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise InputError(f"logits must be [rows, vocab], got {list(logits.shape)}", field="logits")
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    expect("out", out, len(logits), dtype=torch.int64)
    run = _chosen(GREEDY, kernel, len(logits), logits.dtype)
    run(logits=logits, out=out)
    return out


def token(
    normed: torch.Tensor,
    weight: torch.Tensor,
    shortlist: Shortlist,
    noise: torch.Tensor | None = None,
    *,
    kernel: Kernel = None,
) -> torch.Tensor:
    """The first token of the largest logit + noise of each row, [rows] int64; -1 for a row that is not finite.

    normed: [rows, hidden]; weight: lm_head [vocab, hidden]; shortlist: of this weight.
    noise: [rows, vocab] float32, finite; Gumbel's draws from the distribution of the logits. None: the largest logit.
    A logit is rounded to normed's dtype, as `logits` rounds it, before the noise is added.
    """
    _check_weight(weight, normed.shape[-1])
    if noise is not None:
        expect("noise", noise, len(normed), len(weight), dtype=torch.float32)
    run = _chosen(TOKEN, kernel, len(normed), normed.dtype, weight)
    return run(normed=normed, weight=weight, shortlist=shortlist, noise=noise)
