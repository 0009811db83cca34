"""Rotary embeddings in their three forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ascend_emulator.ops.table import kernel, name_of, poison_, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

HALF, INTERLEAVE = "half", "interleave"
# which of the first three dimensions of cos and sin may be 1, for BNSD, BSND and SBND
BROADCASTS = ((), (0, 1), (1,), (0, 2), (2,), (1, 2))


def rotated(x: torch.Tensor, mode: str) -> torch.Tensor:
    """(-second, first) of halves, or of neighbours."""
    if mode == HALF:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    return x.float() * cos.float() + rotated(x.float(), mode) * sin.float()


@kernel("npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor")
def rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """x * cos + rotate(x) * sin on four dimensions; the binding casts cos and sin to x's dtype first."""
    call = Call.of("npu_rotary_mul", "aclnnRotaryPositionEmbedding")
    call.require(
        rotary_mode in (HALF, INTERLEAVE),
        73,
        f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {rotary_mode}",
        Layer.BINDING,
    )
    sizes = f"x {shape(input)}, cos {shape(r1)}, sin {shape(r2)}"
    call.require(
        input.dim() == r1.dim() == r2.dim() == 4, 73, f"all should have four dimensions: {sizes}", Layer.PARAMETER
    )
    dim = input.size(-1)
    call.require(dim % 2 == 0 and dim < 896, 73, f"D should be even and below 896: {sizes}", Layer.PARAMETER)
    call.require(
        r1.shape == r2.shape and r1.size(-1) == dim, 73, f"cos and sin should be alike: {sizes}", Layer.PARAMETER
    )
    fits = any(
        all(r1.size(d) == input.size(d) or (d in ones and r1.size(d) == 1) for d in range(3)) for ones in BROADCASTS
    )
    call.require(
        fits, 73, f"cos and sin broadcast over the heads, or over the heads and the batch: {sizes}", Layer.PARAMETER
    )
    out = poisoned(input.shape, input)
    if call.context.execute:
        cos, sin = (call.context.rounded(t, input.dtype) for t in (r1, r2))
        out.copy_(_turn(input, cos, sin, rotary_mode))
    return out


@kernel(
    "npu::npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSH', "
    "str rotary_mode='half') -> (Tensor, Tensor)"
)
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSH",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates query and key [B, S, N, D] in place by cos and sin [B, S, 1, D]."""
    call = Call.of("npu_apply_rotary_pos_emb", "aclnnApplyRotaryPosEmbV2")
    call.require(
        rotary_mode in (HALF, "quarter", INTERLEAVE),
        None,
        f"The layout should be half/quarter/interleave, but got {rotary_mode}",
        Layer.BINDING,
    )
    tensors = (query, key, cos, sin)
    sizes = f"query {shape(query)}, key {shape(key)}, cos {shape(cos)}, sin {shape(sin)}"
    call.require(layout not in ("BNSD", "SBND"), 72, f"layout should be BSND, got {layout}", Layer.PARAMETER)
    call.require(all(t.dim() == 4 for t in tensors), 72, f"all should have four dimensions: {sizes}", Layer.PARAMETER)
    call.require(all(t.numel() for t in tensors), 72, f"none should be empty: {sizes}", Layer.PARAMETER)
    call.require(
        len({t.dtype for t in tensors}) == 1,
        72,
        f"all should share one dtype, got {', '.join(name_of(t.dtype) for t in tensors)}",
        Layer.PARAMETER,
    )
    call.require(all(t.size(3) == 128 for t in tensors), 72, f"D should be 128: {sizes}")
    call.require(cos.size(2) == sin.size(2) == 1, 72, f"cos and sin should be [B, S, 1, D]: {sizes}")
    if rotary_mode == "quarter":
        raise NotEmulatedError("npu_apply_rotary_pos_emb: the emulator has no quarter mode")
    if call.context.execute:
        for tensor in (query, key):
            tensor.copy_(_turn(tensor, cos, sin, rotary_mode))
    return query, key


@dataclass
class _Process:
    """Static variables of libop_plugin_atb, set by the first call."""

    table: torch.Tensor | None = None
    token_count: int = -1


_process = _Process()


def forget_process_state() -> None:
    """Simulates a new process in tests: the next `_npu_rotary_embedding` is the first again."""
    global _process
    _process = _Process()


@kernel(
    "atb::_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor "
    "cos_sin_cache, bool is_neox_style) -> ()"
)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotates query [T, N * D] and key [T, N_kv * D] in place, always with the process's first cos_sin_cache."""
    call = Call.of("_npu_rotary_embedding", "RopeOperation")
    for name, tensor in (("query", query), ("key", key)):
        call.require(
            tensor.is_contiguous(),
            75,
            f"at_tensor is not contiguous: {name} {shape(tensor)} with strides {list(tensor.stride())} is written in "
            "place",
            Layer.BINDING,
        )
        call.require(tensor.dim() == 2, 75, f"{name} should have two dimensions, got {shape(tensor)}", Layer.BINDING)
    tokens = positions.numel()
    call.require(
        tokens == query.size(0) == key.size(0), 75, f"{tokens} positions for query {shape(query)} and key {shape(key)}"
    )
    if call.context.capturing:
        call.require(
            _process.table is not None and _process.token_count == tokens,
            75,
            f"the first call and a new token count ({_process.token_count} before, {tokens} now) copy from the host: "
            "warm up with the same count before capturing",
            Layer.CAPTURE,
        )
    if call.context.execute and _process.table is None:
        _process.table = cos_sin_cache.detach().clone()
    _process.token_count = tokens
    if call.context.execute:
        _rotate_in_place(call, positions.flatten().long(), (query, key), cos_sin_cache, is_neox_style)


def _rotate_in_place(
    call: Call, at: torch.Tensor, tensors: tuple[torch.Tensor, torch.Tensor], cache: torch.Tensor, neox: bool
) -> None:
    table = _process.table
    rows = min(table.size(0), cache.size(0))
    outside = bool(((at < 0) | (at >= rows)).any())
    if outside or table.dtype != cache.dtype or table.size(1) != cache.size(1) or not torch.equal(table[at], cache[at]):
        call.undefined(
            75,
            f"tables are built once per process from the first cache, {name_of(table.dtype)} {shape(table)}; this "
            f"call's, {name_of(cache.dtype)} {shape(cache)}, differs where its positions read",
        )
        if outside and int(at.max()) >= table.size(0):
            for tensor in tensors:
                poison_(tensor)
            return
    half = table[at].float().chunk(2, -1)
    cos, sin = (torch.cat([t, t], -1) if neox else t.repeat_interleave(2, -1) for t in half)
    for tensor in tensors:
        heads = tensor.view(tensor.size(0), -1, cos.size(-1))
        heads.copy_(_turn(heads, cos[:, None], sin[:, None], HALF if neox else INTERLEAVE))
