"""The dense operations on plain torch ops, for any device.

Projections and router logits are rounded to the model's dtype, RMSNorm's result and RoPE's too, each once. The residual
stream is not rounded at all. In float32 these are the operations that are compared with transformers; an accelerator's
kernel must round in the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_gptoss.attention import StepMetadata, write_kv_cache
from npu_gptoss.dense.operations import ADD_NORM, FLOATS, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN
from npu_gptoss.dense.shortlist import Shortlist
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel
from npu_gptoss.moe import route

ONE_DTYPE = tuple(accepts(hidden=dtype, weight=dtype) for dtype in FLOATS)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each head; dimension i pairs with i + head_dim / 2 ("neox" halves).

    Args:
        x: `[tokens, heads, head_dim]`.
        cos, sin: `[tokens, head_dim / 2]`, the tables' rows for the tokens' positions.

    Returns a new tensor like x. With float32 tables it is computed in float32 and rounded once, at the end.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """hidden [tokens, hidden], weight [hidden] float32 -> [tokens, hidden] in `dtype`; computed in fp32."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(dtype)


def route_live(logits: torch.Tensor, top_k: int, live: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The MoE family's own routing; rows that are not `live` get weights 0 and ids -1."""
    weights, ids = route(logits, top_k)
    if live is not None:
        padding = (live <= 0)[:, None]
        weights, ids = weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)
    return weights, ids


def _add(residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    return residual if delta is None else residual.float() + delta


@register_kernel(
    QKV,
    solution="small_ops",
    signatures=tuple(accepts(hidden=dtype, weight=dtype, kv=FLOATS) for dtype in FLOATS),
    traits={"head_dim": ANY},
    priority=Priority.PORTABLE,
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
    """Plain torch ops, and the attention family's own cache write, which on Ascend can be captured in a graph."""
    hidden = _add(residual, delta)
    normed = rms_norm(hidden, norm_weight, eps, weight.dtype)
    kv_heads, head_dim = key_cache.shape[2:]
    packed = F.linear(normed, weight, bias).unflatten(-1, (-1, head_dim))
    query, key, value = packed.split((packed.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    write_kv_cache(apply_rotary(key, cos, sin), value, key_cache, value_cache, metadata)
    return hidden, apply_rotary(query, cos, sin)


@register_kernel(
    ROTATE_WRITE,
    solution="small_ops",
    signatures=(accepts(qkv=FLOATS, kv=FLOATS),),
    traits={"head_dim": ANY},
    priority=Priority.PORTABLE,
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
    """Plain torch ops; the host waits for the slots."""
    tokens, kv_heads = len(qkv), key_cache.shape[2]
    cos, sin = cos_sin[positions[:tokens]].float().chunk(2, -1)
    parts = (query.shape[1], kv_heads, kv_heads)
    turned, key, value = qkv.unflatten(-1, (-1, key_cache.shape[3])).split(parts, 1)
    query.copy_(apply_rotary(turned, cos, sin))
    slots = slot_mapping[:tokens]
    kept = slots >= 0
    for new, cache in ((apply_rotary(key, cos, sin), key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots[kept]] = new[kept].to(cache.dtype)


@register_kernel(OUTPUT, solution="small_ops", signatures=ONE_DTYPE, priority=Priority.PORTABLE)
def output(
    attended: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """A linear layer, and an add."""
    product = F.linear(attended, weight, bias)
    return product if residual is None else residual.float() + product


@register_kernel(ROUTER, solution="small_ops", signatures=ONE_DTYPE, priority=Priority.PORTABLE)
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
    """Plain torch ops, and the MoE family's own routing."""
    hidden = _add(residual, delta)
    normed = rms_norm(hidden, norm_weight, eps, weight.dtype)
    return hidden, normed, *route_live(F.linear(normed, weight, bias), top_k, live)


@register_kernel(ADD_NORM, solution="small_ops", signatures=(accepts(hidden=FLOATS),), priority=Priority.PORTABLE)
def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """An add, and RMSNorm in fp32."""
    hidden = _add(residual, delta)
    return hidden, rms_norm(hidden, norm_weight, eps, dtype)


@register_kernel(LOGITS, solution="small_ops", signatures=ONE_DTYPE, priority=Priority.PORTABLE)
def logits(normed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """A matrix product."""
    torch.mm(normed, weight.T, out=out)


@register_kernel(GREEDY, solution="small_ops", signatures=(accepts(logits=FLOATS),), priority=Priority.PORTABLE)
def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """torch.argmax."""
    sound = (logits < torch.inf).all(-1) & (logits > -torch.inf).any(-1)  # NaN compares false, on every device
    out.copy_(torch.where(sound, logits.argmax(dim=-1), -1))


@register_kernel(TOKEN, solution="small_ops", signatures=ONE_DTYPE, priority=Priority.PORTABLE)
def token(normed: torch.Tensor, weight: torch.Tensor, shortlist: Shortlist, noise: torch.Tensor | None) -> torch.Tensor:
    """All logits, and torch.argmax."""
    product = F.linear(normed, weight)
    out = torch.empty(len(normed), dtype=torch.int64, device=normed.device)
    greedy(product if noise is None else product.float() + noise, out)
    return out
