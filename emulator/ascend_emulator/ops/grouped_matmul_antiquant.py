"""The grouped matmul of bfloat16 or float16 rows with int8 or int4 weights: choice of kernel, and its workspace.

A 910B cannot multiply mixed types. The first kernel expands the weights of each expert that has rows into a workspace,
on the vector cores, and multiplies these: it saves memory, not time. The second ("MSD") splits each row into two int8
planes and multiplies them with the stored weights; it resolves about 15 bits of a row's largest value, and needs
aligned sizes, unlike 2880. From CANN 8.3.RC1, `grouped_matmul_tiling.cpp` and `grouped_matmul_antiquant_a16w8_msd.h`.
"""

from __future__ import annotations

import math

import torch
from ascend_emulator.ops.table import Arguments

CORES = 20  # cubes of a 910B3
RESERVED = 16 << 20  # bytes that every call of the operator takes
MSD_ALIGNMENT, MSD_WIDEST_K, MSD_NARROWEST_N, MSD_ROWS_PER_EXPERT = 128, 12 * 1024, 1024, 64
PLANES, FIRST_SCALE, SECOND_SCALE = 2, 127, 254
TILE_M, TILE_N = 128, 256
BUSY_CUBES = int(CORES * 0.4)
LARGE_PANEL = 5 << 20  # elements of K * TILE_N over all cubes


def _sizes(a: Arguments) -> tuple[int, int, int, int]:
    """M, K, E and N."""
    packed = a.weight[0].dtype == torch.int32
    experts, inner, columns = a.weight[0].shape
    return a.x[0].size(0), inner, experts, columns * (8 if packed else 1)


def is_weight_only(a: Arguments) -> bool:
    single = len(a.x) == len(a.weight) == 1 and a.weight[0].dim() == 3
    return single and a.x[0].dtype.is_floating_point and a.weight[0].dtype in (torch.int8, torch.int32)


def runs_on_planes(a: Arguments) -> bool:
    """True if the int8 kernel takes the call."""
    rows, inner, experts, columns = _sizes(a)
    return (
        a.weight[0].dtype == torch.int8
        and a.group_type == 0
        and inner % MSD_ALIGNMENT == columns % MSD_ALIGNMENT == 0
        and inner <= MSD_WIDEST_K
        and columns >= MSD_NARROWEST_N
        and rows <= MSD_ROWS_PER_EXPERT * experts
    )


def _away_from_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def product_of_planes(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """x [M, K] with weight [K, N] int8, scale and offset [N] -> [M, N] float32, without bias."""
    rows = x.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scaled = rows * (FIRST_SCALE / largest).where(largest > 0, 0.0)
    first = _away_from_zero(scaled)
    second = _away_from_zero(SECOND_SCALE * (scaled - first))
    sums = [(plane.double() @ weight.double()).float() for plane in (first, second)]  # int32 on the device: exact
    product = (sums[0] + sums[1] / SECOND_SCALE) * (largest / FIRST_SCALE)
    return (product + offset.float() * rows.sum(-1, keepdim=True)) * scale.float()


def expanded_bytes(a: Arguments, used: int) -> int:
    """Bytes of `used` experts' weights, which the first kernel writes and reads again; 0 for any other product."""
    if not is_weight_only(a) or runs_on_planes(a):
        return 0
    _, inner, _, columns = _sizes(a)
    return used * inner * columns * a.x[0].element_size()


def workspace(a: Arguments) -> int:
    """Bytes: planes and products; or two experts' weights in turn; or all experts' weights if cubes would idle."""
    if not is_weight_only(a):
        return 0
    rows, inner, experts, columns = _sizes(a)
    if runs_on_planes(a):
        return RESERVED + rows * (CORES * 4 + 32 + PLANES * (inner + 4 * columns))
    weight = a.weight[0]
    transposed = weight.stride(1) == 1 and weight.stride(2) != 1
    tile_m = min(TILE_M, 16 * math.ceil(max(rows, 1) / 16))
    tiles = math.ceil(math.ceil(rows / experts) / tile_m) * math.ceil(columns / TILE_N)
    busy = tiles * (2 if a.x[0].dtype == torch.bfloat16 else 1) >= BUSY_CUBES and inner * TILE_N * CORES >= LARGE_PANEL
    held = 2 if busy and not transposed else experts
    return RESERVED + held * inner * columns * a.x[0].element_size()
