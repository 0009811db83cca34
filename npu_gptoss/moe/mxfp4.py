"""MXFP4, the format of gpt-oss's experts: 32 four-bit floats (E2M1) share one power of two (E8M0).

Contract: OCP Microscaling Formats (MX) Specification 1.0, and the tensors of openai/gpt-oss-20b and -120b:

* `blocks` uint8 `[..., groups, 16]`: two values in a byte, **the low nibble first**;
* `scales` uint8 `[..., groups]`: the group is multiplied by `2 ** (scale - 127)`; 255 is NaN.

`expand` is a table look-up without arithmetic, so every value that bfloat16 and float32 can hold is exact on every
device, subnormals included. `compress` is its inverse; for values that are not representable it rounds as the
specification says (section 6.3).
"""

from __future__ import annotations

import functools
import math

import torch

from npu_gptoss.errors import InputError

GROUP = 32  # values that share a scale
BITS = 4 + 8 / GROUP  # of one value, with its share of the scale
_BYTES = GROUP // 2  # of one group
_BIAS = 127  # of the scale's exponent
_NAN_SCALE = 255
_MAX_EXPONENT = 2  # of the largest E2M1 value: 6 = 1.5 * 2 ** 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; codes 8 to 15 are the same, negative
_LARGEST_SAFE_SCALE = 252  # 6 * 2 ** (252 - 127) still fits; above it some codes overflow bfloat16 and float32

# one look-up yields a byte's two values, moved as one word of their joint size
_WORD = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
# On a CPU both work in steps of 32 Ki elements: these stay in the cache, and torch runs them on the calling thread.
# Larger ones wait for a team of threads at every step, which on a shared machine is up to a hundred times slower.
_EXPAND_CHUNK = 1 << 15  # bytes of blocks
_COMPRESS_CHUNK = 1 << 10  # groups
_ON_A_DEVICE = 1 << 8  # times as much in a step elsewhere, where steps so short are nothing but launches


class Mxfp4Error(InputError):
    """Tensors that are not MXFP4, or weights that MXFP4 cannot hold."""


def expand(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """MXFP4 to floats, exactly.

    Args:
        blocks: `[..., groups, 16]` uint8.
        scales: `[..., groups]` uint8.
        dtype: bfloat16 or float32; both hold every finite MXFP4 value below 2 ** 128.

    Returns `[..., groups * 32]`, on the device of `blocks`. Peak memory is the result and, on a CPU, less
    than a MiB; on a device less than 100 MiB.

    Raises Mxfp4Error for other shapes or dtypes, for a scale of 255 (NaN) and for values that overflow `dtype`: a
    trained checkpoint has neither, so both mean damaged data.
    """
    _check_pair(blocks, scales, dtype)
    out = torch.empty(scales.numel() * GROUP, dtype=dtype, device=blocks.device)
    _expand_into(out, blocks, scales)
    return out.view(*blocks.shape[:-2], blocks.shape[-2] * GROUP)


def expand_transposed(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Does as `expand`, from `[experts, rows, groups, 16]` to the official BF16 layout `[experts, groups * 32, rows]`.

    One expert at a time, so that the peak is the result and one expert.
    """
    _check_pair(blocks, scales, dtype)
    if blocks.dim() != 4:
        raise Mxfp4Error(f"blocks must be [experts, rows, groups, 16], got shape {list(blocks.shape)}.", field="blocks")
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, groups * GROUP, rows, dtype=dtype, device=blocks.device)
    one = torch.empty(rows, groups * GROUP, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        _expand_into(one.view(-1), blocks[expert], scales[expert])
        out[expert].copy_(one.t())
    return out


def compress(
    weight: torch.Tensor, *, published: bool = False, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats to MXFP4 along the last axis.

    The shared exponent is that of the group's largest magnitude less 2, so that this value falls into [4, 8); each
    value then goes to the nearest E2M1 value, ties to the even code, and what exceeds 6 becomes 6. Signs are kept,
    also of zero. A group of zeros gets the scale 1. What is representable comes back unchanged:
    `expand(*compress(expand(b, s))) == expand(b, s)`.

    Args:
        weight: `[..., K]` bfloat16, float16 or float32, K a multiple of 32.
        published: the recipe of openai/gpt-oss (`gpt_oss/triton/moe.py`) and transformers (`quantize_to_mxfp4`), which
            is `downcast_to_mxfp` of triton_kernels: from bfloat16, under the smallest power of two with which nothing
            exceeds 6, ties away from zero; the scale of a group of zeros is the smallest.
        kept: with `published`, `[..., K / 32]` uint8, scales that a group takes where they hold all its values exactly:
            several scales may, and these give the bytes of before.

    Returns `blocks` `[..., K / 32, 16]` and `scales` `[..., K / 32]`, uint8. Raises Mxfp4Error for NaN, Inf, other
    dtypes and other K.
    """
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Mxfp4Error(
            f"weights must be bfloat16, float16 or float32 to be compressed, got {weight.dtype}.", field="weight"
        )
    if weight.dim() == 0 or weight.shape[-1] % GROUP:
        raise Mxfp4Error(
            f"the last axis must be a multiple of {GROUP} (values that share a scale), got shape {list(weight.shape)}. "
            "Transpose the weight if the axis that is summed over is another one, or pad it with zeros.",
            field="weight",
        )
    flat, kept = weight.reshape(-1, GROUP), None if kept is None else kept.reshape(-1)
    blocks = torch.empty(flat.shape[0], _BYTES, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(flat.shape[0], dtype=torch.uint8, device=weight.device)
    step = _step(_COMPRESS_CHUNK, weight.device)
    for start in range(0, flat.shape[0], step):
        rows = slice(start, start + step)
        values = (flat[rows].to(torch.bfloat16) if published else flat[rows]).float()
        blocks[rows], scales[rows] = _compress_groups(values, published, None if kept is None else kept[rows])
    shape = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    return blocks.view(*shape, _BYTES), scales.view(shape)


def _step(on_a_cpu: int, device: torch.device) -> int:
    if device.type == "cpu":  # alone, torch need not start threads, and twice as fast are steps of half a MiB
        return on_a_cpu * (8 if torch.get_num_threads() == 1 else 1)
    return on_a_cpu * _ON_A_DEVICE


def _expand_into(out: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the values of all groups one after the other into `out`, `[groups * 32]`."""
    groups = scales.numel()
    words = out.view(_WORD[out.dtype])  # [groups * 16]
    table = _table(out.dtype).to(blocks.device)
    flat_blocks, flat_scales = blocks.reshape(groups, _BYTES), scales.reshape(groups, 1)
    step = _step(_EXPAND_CHUNK, blocks.device) // _BYTES
    for start in range(0, groups, step):
        stop = start + step
        index = (flat_scales[start:stop].to(torch.int32) << 8) + flat_blocks[start:stop]
        torch.index_select(table, 0, index.view(-1), out=words[start * _BYTES : stop * _BYTES])
    _check_range(scales, out)


def _compress_groups(
    values: torch.Tensor, published: bool, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[groups, 32]` float32 to `[groups, 16]` and `[groups]` uint8."""
    largest = values.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        bad = int((~torch.isfinite(values)).sum())
        raise Mxfp4Error(
            f"weights must be finite to be compressed, got {bad} NaN or Inf; MXFP4 has neither. Repair them first.",
            field="weight",
        )
    mantissa, exponent = torch.frexp(largest)  # the mantissa is in [0.5, 1)
    exponent = exponent - 1 - _MAX_EXPONENT
    if published:
        exponent += mantissa > 0.75  # 6 is 0.75 * 2 ** 3
    exponent = torch.where(largest == 0, -_BIAS if published else 0, exponent).clamp(min=-_BIAS).to(torch.int32)
    if kept is not None:
        theirs = kept.to(torch.int32) - _BIAS
        line = _line((values * _power(-theirs)[:, None]).abs_())
        exact = ((line == line.floor()) & (line <= 7)).all(dim=-1) & (kept != _NAN_SCALE)
        exponent = torch.where(exact, theirs, exponent)
    scaled = values * _power(-exponent)[:, None]
    size = scaled.abs()
    if published:  # ties upwards; the sums of scaled bfloat16 are exact
        codes = _line(size).add_(0.5).floor_()
    else:  # rounding halves to even goes to the even code on all three lines
        codes = torch.minimum((2 * size).round_(), size.round().add_(2))
        codes = torch.minimum(codes, (size / 2).round_().add_(4))
    codes = codes.clamp_(max=7).to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent + _BIAS).to(torch.uint8)


def _line(size: torch.Tensor) -> torch.Tensor:
    """The code of a scaled magnitude before rounding: E2M1 has steps of a half below 2, of one below 4, of two above.

    In its own range each of the three lines is the lowest.
    """
    return torch.minimum(torch.minimum(2 * size, size + 2), (size / 2).add_(4))


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent from its bits: exact, where a power function need not be."""
    return ((_BIAS + exponent) << 23).view(torch.float32)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """`[65536]` words: entry `scale * 256 + byte` holds the byte's two values, the low nibble's first.

    On the CPU: on a device it would lie in vLLM's memory for weights, which sleep at level 2 throws away.
    """
    with torch.device("cpu"):  # also where a loader has made an accelerator the default device
        values = torch.tensor([_values(scale) for scale in range(256)], dtype=torch.float64).to(dtype)  # [256, 16]
        byte = torch.arange(256)
    pairs = torch.stack([values[:, byte & 0x0F], values[:, byte >> 4]], dim=-1)  # [256, 256, 2]
    return pairs.view(_WORD[dtype]).view(-1)


def _values(scale: int) -> list[float]:
    """The 16 values under one scale, in double precision, which holds all of them."""
    if scale == _NAN_SCALE:
        return [math.nan] * 16
    positive = [math.ldexp(value, scale - _BIAS) for value in E2M1]
    return positive + [-value for value in positive]


def _check_pair(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in _WORD:
        raise Mxfp4Error(
            f"MXFP4 can be expanded to bfloat16 or float32, got {dtype}, whose range is too small. Take either.",
            field="dtype",
        )
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise Mxfp4Error(f"blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}.", field="blocks")
    if blocks.dim() < 2 or blocks.shape[-1] != _BYTES or blocks.shape[:-1] != scales.shape:
        raise Mxfp4Error(
            f"blocks must be [..., groups, {_BYTES}] and scales [..., groups], "
            f"got {list(blocks.shape)} and {list(scales.shape)}.",
            field="blocks",
        )


def _check_range(scales: torch.Tensor, values: torch.Tensor) -> None:
    """Looks at the values only where a scale lets them overflow, which no trained checkpoint has."""
    if scales.numel() == 0:
        return
    largest = int(scales.max())
    if largest <= _LARGEST_SAFE_SCALE:
        return
    if largest == _NAN_SCALE:
        count = int((scales == _NAN_SCALE).sum())
        raise Mxfp4Error(
            f"scales must be at most 254, got {count} of 255, which means NaN. The data is damaged: download it again.",
            field="scales",
        )
    if not torch.isfinite(values).all():
        raise Mxfp4Error(
            f"values must be below 2 ** 128, got a scale of {largest} with values above it. "
            "The data is damaged: download it again.",
            field="scales",
        )
