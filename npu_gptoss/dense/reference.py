"""The definition of the dense operations, in fp32: compare it with the model card.

    hidden  = residual + delta
    normed  = hidden / sqrt(mean(hidden^2) + eps) * norm_weight
    q, k, v = normed @ weight.T + bias;   q and k turned by RoPE;   k, v stored at their slots
    output  = residual + attended @ weight.T + bias
    router  = top-k of normed @ weight.T + bias, softmax over the k
    logits  = normed @ lm_head.T
    token   = argmax of logits + noise

(openai/gpt-oss `gpt_oss/torch/model.py`.) The sum is float32; other results
are rounded to the dtype of the weights once, at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_gptoss.attention import StepMetadata
from npu_gptoss.dense.operations import ADD_NORM, FLOATS, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN
from npu_gptoss.dense.shortlist import Shortlist
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel


def _add(residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    return residual.float() if delta is None else residual.float() + delta.float()


def _norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.float()


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()


@register_kernel(
    ROTATE_WRITE,
    solution="reference",
    signatures=(accepts(qkv=FLOATS, kv=FLOATS),),
    traits={"head_dim": ANY},
    priority=Priority.REFERENCE,
)
def rotate_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """The definition, one row at a time in fp32. query [tokens, heads, head_dim] is written."""
    (kv_heads, dim), heads = key_cache.shape[2:], query.shape[1]
    for row, packed in enumerate(qkv.float().unflatten(-1, (-1, dim))):
        cos, sin = cos_sin[positions[row]].float().chunk(2)
        first, second = packed[: heads + kv_heads].chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        query[row] = turned[:heads].to(query.dtype)
        if (slot := int(slot_mapping[row])) >= 0:
            key_cache.flatten(0, 1)[slot] = turned[heads:].to(key_cache.dtype)
            value_cache.flatten(0, 1)[slot] = packed[heads + kv_heads :].to(value_cache.dtype)


@register_kernel(
    QKV,
    solution="reference",
    signatures=(accepts(hidden=FLOATS, weight=FLOATS, kv=FLOATS),),
    traits={"head_dim": ANY},
    priority=Priority.REFERENCE,
)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    hidden = _add(residual, delta)
    packed = _linear(_norm(hidden, norm_weight, eps), weight, bias)
    heads, dim = packed.shape[1] // key_cache.shape[3] - 2 * key_cache.shape[2], key_cache.shape[3]
    query = torch.empty(len(packed), heads, dim, dtype=weight.dtype, device=weight.device)
    slots = F.pad(metadata.slot_mapping[: metadata.num_tokens], (0, len(packed) - metadata.num_tokens), value=-1)
    rotate_write(packed, cos_sin, positions, key_cache, value_cache, slots, query)
    return hidden, query


@register_kernel(
    OUTPUT, solution="reference", signatures=(accepts(hidden=FLOATS, weight=FLOATS),), priority=Priority.REFERENCE
)
def output(
    attended: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """The definition."""
    product = _linear(attended, weight, bias)
    return product.to(attended.dtype) if residual is None else product + residual.float()


@register_kernel(
    ROUTER, solution="reference", signatures=(accepts(hidden=FLOATS, weight=FLOATS),), priority=Priority.REFERENCE
)
def router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    live: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition: full sort, fp32 softmax over the k."""
    hidden = _add(residual, delta)
    normed = _norm(hidden, norm_weight, eps)
    logits = _linear(normed, weight, bias)
    ids = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :top_k]
    weights = torch.softmax(logits.gather(1, ids), dim=-1)
    if live is not None:
        weights[live <= 0], ids[live <= 0] = 0.0, -1
    return hidden, normed.to(weight.dtype), weights, ids


@register_kernel(ADD_NORM, solution="reference", signatures=(accepts(hidden=FLOATS),), priority=Priority.REFERENCE)
def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    hidden = _add(residual, delta)
    return hidden, _norm(hidden, norm_weight, eps).to(dtype)


@register_kernel(
    LOGITS, solution="reference", signatures=(accepts(hidden=FLOATS, weight=FLOATS),), priority=Priority.REFERENCE
)
def logits(normed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The definition."""
    out.copy_(_linear(normed, weight, None))


@register_kernel(GREEDY, solution="reference", signatures=(accepts(logits=FLOATS),), priority=Priority.REFERENCE)
def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The definition: the first of equals; -1 where the largest is NaN, infinity, or minus infinity."""
    largest = logits.amax(-1, keepdim=True)
    first = (logits == largest).int().argmax(-1)
    out.copy_(torch.where(torch.isfinite(largest[:, 0]), first, -1))


@register_kernel(
    TOKEN, solution="reference", signatures=(accepts(hidden=FLOATS, weight=FLOATS),), priority=Priority.REFERENCE
)
def token(normed: torch.Tensor, weight: torch.Tensor, shortlist: Shortlist, noise: torch.Tensor | None) -> torch.Tensor:
    """The definition, which needs no shortlist."""
    logits = _linear(normed, weight, None).to(normed.dtype).float()
    largest = logits if noise is None else logits + noise
    out = torch.empty(len(normed), dtype=torch.int64, device=normed.device)
    greedy(largest, out)
    return out
