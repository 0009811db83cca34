"""How far a result may be from the fp32 definition, with the reason for each number.

`|got - want| <= scale * (atol + rtol * |want|) + of_largest * max |want| + of_size * size`, compared in fp32; NaN and
Inf always fail. `size` is the sum of the absolute products of a result, where a check knows it: rounding a factor moves
the result by a share of that sum, however much the products cancel.

Self-tests compare whole rows: `norm(got - want) <= of_row * (norm of the largest row of want)`. Rounding on a card that
no one has measured must not fail them, and every known defect is ten times as large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# torch.testing's own: reordering of fp32 sums; two bf16 ulps, and an atol for values that cancel near zero. Of FP8 half
# a step, 2 ** -4 of a value and 2 ** -10 near zero, beside those of bf16.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 1.3e-6),
    torch.bfloat16: (1e-3, 1.6e-2),
    torch.float8_e4m3fn: (2e-3, 8e-2),
}


@dataclass(frozen=True)
class Tolerance:
    """The limits of the module's formulas. exact: all bits are equal, for integers and for values that are moved."""

    atol: float
    rtol: float
    scale: float = 1.0
    of_largest: float = 0.0
    of_size: float = 0.0
    exact: bool = False
    of_row: float = 0.0


EXACT = Tolerance(0.0, 0.0, exact=True)
FLOAT32 = Tolerance(*TOLERANCES[torch.float32])
BFLOAT16 = Tolerance(*TOLERANCES[torch.bfloat16])
ROWS = Tolerance(0.0, 0.0, of_row=0.02)  # bfloat16 rounds up to 0.8 %, every known defect makes 10 % and more
ATTENTION_ROWS = Tolerance(0.0, 0.0, of_row=0.01)  # bfloat16 rounds up to 0.3 %
GATE_ROWS = {  # a softmax in fp32, and one rounded to bfloat16 at its end, by up to 2 ** -9
    torch.float32: Tolerance(0.0, 0.0, of_row=1e-4),
    torch.bfloat16: Tolerance(0.0, 0.0, of_row=2**-8),
}


@dataclass(frozen=True)
class Wider:
    """A tolerance beyond the standard, with its reason."""

    reason: str
    scale: float = 1.0
    of_largest: float = 0.0
    of_size: float = 0.0


SUMS = Wider("sums of up to 4096 products in another order", scale=4)
NORMED = Wider("the normed row is rounded before the product, the product before RoPE turns it", of_largest=1 / 64)
CANCEL = Wider("rounded parts of a sum cancel, in cuBLAS by allow_bf16_reduced_precision_reduction", of_largest=1 / 128)
# (operation, output, precision) -> the widest tolerance that any kernel needs
WIDER: dict[tuple[str, str, str], Wider] = {
    ("attention.paged", "out", "bfloat16"): Wider("the softmax's weights and each result are rounded", of_size=2**-8),
    ("attention.paged", "out", "float32"): Wider("up to 9001 products in another order, rescaled by tile", scale=4),
    ("moe.experts", "out", "float32"): Wider("two sums of up to 2880 products of ten, that cancel", scale=8),
    ("moe.experts", "out", "bfloat16"): Wider("activation, products, shares rounded; they cancel", of_largest=1 / 128),
    ("dense.qkv", "query", "float32"): SUMS,
    ("dense.qkv", "key_cache", "float32"): SUMS,
    ("dense.qkv", "value_cache", "float32"): SUMS,
    ("dense.qkv", "query", "bfloat16"): NORMED,
    ("dense.qkv", "key_cache", "bfloat16"): NORMED,
    ("dense.qkv", "value_cache", "bfloat16"): NORMED,
    ("dense.qkv", "key_cache", "float8_e4m3fn"): NORMED,
    ("dense.qkv", "value_cache", "float8_e4m3fn"): NORMED,
    ("dense.output", "out", "float32"): SUMS,
    ("dense.output", "out", "bfloat16"): CANCEL,
    ("dense.router", "normed", "float32"): SUMS,
    ("dense.router", "weights", "float32"): SUMS,
    ("dense.router", "weights", "bfloat16"): Wider("logits of up to 8, rounded, move the softmax", of_largest=1 / 32),
    ("dense.add_norm", "normed", "float32"): SUMS,
    ("dense.logits", "out", "float32"): SUMS,
    ("dense.logits", "out", "bfloat16"): CANCEL,
    ("rope.rotate", "x", "bfloat16"): Wider("both products are rounded before they cancel", of_largest=1 / 128),
    ("rope.tables", "cos_sin", "float32"): Wider("half an ulp of an angle of 131071 radians", of_largest=2**-7),
}


def tolerance(check: str, output: str, precision: str) -> Tolerance:
    """precision: float32, bfloat16, float8_e4m3fn, or exact."""
    if precision == "exact":
        return EXACT
    atol, rtol = TOLERANCES[getattr(torch, precision)]
    wider = WIDER.get((check, output, precision))
    if wider is None:
        return Tolerance(atol, rtol)
    return Tolerance(atol, rtol, wider.scale, wider.of_largest, wider.of_size)
