"""MXFP4 experts that stay packed: a layer's weights at 4.25 bits, and the expansion of the experts that a step uses.

A grouped product wants [experts, K, N] in bfloat16, the checkpoint has [experts, N, K / 32, 16] in MXFP4. `pack`
arranges the codes once, at load, so that an expansion neither transposes nor gathers:

* a *tile* is 4 * `rows` rows of K with all N columns; `rows` is the least number of rows whose bytes are a multiple of
  512, which is what a transfer on a 910B is aligned to (2 for 5760 columns, 4 for 2880), and at most 8: all rows of a
  tile have the same scales;
* an int16 word has four codes of one column: those of row r, rows + r, 2 * rows + r, 3 * rows + r of its tile. So a
  quarter of a tile is written in one piece, and 16 bits is what the vector cores compute with;
* scales are [experts, K / 32, N].

`expand` fills slots of a ring; the device reads the expert of each slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import (
    TRITON_ASCEND,
    Priority,
    Range,
    accepts,
    define_operation,
    expect,
    register_kernel,
    select_kernel,
    signature,
)
from npu_gptoss.moe import mxfp4

ALIGNED = 512  # bytes
MOST_ROWS = mxfp4.GROUP // 4
# Values in a quarter of a tile. Huawei's compiler places the buffers of one so large, two in turn of what is loaded and
# stored, in 155 520 to 192 960 of a vector core's 196 608 bytes (`npu-gptoss verify --compile`).
# gpt-oss has exactly so many.
MOST_IN_A_QUARTER = 11520

EXPAND = define_operation(
    "moe",
    "expand",
    roles=("out",),
    sizes=("quarter",),
    summary="packed MXFP4 experts to the slots of a ring, those and where the device's ids say",
)


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of a layer's local experts: words [experts, K / (4 * rows), rows, N] int16, scales
    [experts, K / 32, N] uint8."""

    words: torch.Tensor
    scales: torch.Tensor

    @property
    def rows(self) -> int:
        return self.words.shape[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, K, N) of the expanded experts."""
        experts, tiles, rows, columns = self.words.shape
        return experts, 4 * tiles * rows, columns


def rows_of(columns: int) -> int:
    """Returns a quarter of a tile's rows. More than 8 would be aligned only for widths that no cut of gpt-oss has."""
    return min(ALIGNED // math.gcd(ALIGNED, 2 * columns), MOST_ROWS)


def pack(blocks: torch.Tensor, scales: torch.Tensor, *, halves: bool) -> PackedMatrix:
    """blocks [experts, N, K / 32, 16] and scales [experts, N, K / 32] of a checkpoint, one expert at a time.

    halves: the rows are gate, up, gate, up …, and all gate columns come first here.
    Raises Mxfp4Error for tensors that `mxfp4.expand` does not take.
    """
    experts, columns, groups, _ = blocks.shape
    rows = rows_of(columns)
    words = torch.empty(
        (experts, groups * mxfp4.GROUP // (4 * rows), rows, columns), dtype=torch.int16, device=blocks.device
    )
    by_row = torch.empty((experts, groups, columns), dtype=torch.uint8, device=blocks.device)
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=blocks.device)[:, None, None]
    for expert in range(experts):
        mxfp4.expand(blocks[expert], scales[expert])  # for its objections
        block, scale = blocks[expert], scales[expert]
        if halves:
            block, scale = (torch.cat((t[0::2], t[1::2])) for t in (block, scale))
        codes = torch.stack((block & 15, block >> 4), -1).view(columns, -1).t()  # [K, N]
        quarters = codes.reshape(-1, 4, rows, columns).to(torch.int32) << shifts
        words[expert] = quarters.sum(1, dtype=torch.int32).to(torch.int16)  # the codes do not overlap
        by_row[expert] = scale.t()
    return PackedMatrix(words, by_row)


def unpack(packed: PackedMatrix) -> torch.Tensor:
    """[experts, K, N] in bfloat16: every expert, by `mxfp4.expand`."""
    return mxfp4.expand(*blocks_of(packed)).mT.contiguous()


def blocks_of(packed: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack`, with the rows in the order of the packed columns."""
    experts, depth, columns = packed.shape
    words = packed.words.to(torch.int32)
    codes = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], 2).view(experts, depth, columns).mT
    pairs = codes.reshape(experts, columns, -1, mxfp4.GROUP // 2, 2).to(torch.uint8)
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).contiguous()
    return blocks, packed.scales.mT.contiguous()


def expand(packed: PackedMatrix, experts: torch.Tensor, out: torch.Tensor, *, kernel: str | None = None) -> None:
    """`out[slot]` becomes the expert `experts[slot]`, for each slot whose expert is not negative; the others stay.

    experts: [slots] int32, on the device: nothing waits for it. out: [slots, K, N] bfloat16, contiguous.
    """
    expect("experts", experts, len(experts), dtype=torch.int32)
    expect("out", out, len(experts), *packed.shape[1:], dtype=torch.bfloat16)
    if not out.is_contiguous():
        raise InputError(f"out must be contiguous, got strides {out.stride()}", field="out")
    quarter = packed.rows * packed.shape[2]
    run = select_kernel(EXPAND, signature(out=out.dtype), {"quarter": quarter}, override=kernel)
    run(packed=packed, experts=experts, out=out)


@register_kernel(EXPAND, solution="reference", signatures=(accepts(out="bfloat16"),), priority=Priority.REFERENCE)
def expand_reference(packed: PackedMatrix, experts: torch.Tensor, out: torch.Tensor) -> None:
    """The definition: `mxfp4.expand` of each expert, on the host's word."""
    for slot, expert in enumerate(experts.tolist()):
        if expert >= 0:
            one = PackedMatrix(packed.words[expert : expert + 1], packed.scales[expert : expert + 1])
            out[slot] = unpack(one)[0]


@register_kernel(EXPAND, solution="small_ops", signatures=(accepts(out="bfloat16"),), priority=Priority.PORTABLE)
def expand_small_ops(packed: PackedMatrix, experts: torch.Tensor, out: torch.Tensor) -> None:
    """Plain torch ops, for every slot: many times the bytes, and `mxfp4.expand` waits to look at the scales."""
    ids = experts.clamp(min=0).long()
    chosen = unpack(PackedMatrix(packed.words[ids], packed.scales[ids]))
    out.copy_(torch.where((experts >= 0)[:, None, None], chosen, out))


register_kernel(
    EXPAND,
    solution="triton_ascend",
    capability=TRITON_ASCEND,
    signatures=(accepts(out="bfloat16"),),
    traits={"quarter": Range(most=MOST_IN_A_QUARTER)},
    priority=Priority.SPECIALISED,
    function="npu_gptoss.moe.triton_ascend:expand",
    summary="One launch over a fixed grid; integers only, so nothing rounds.",
)
