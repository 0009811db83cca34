"""Sizes of the kernels' tiles: the one table. Measured on one NVIDIA H200, for hidden and intermediate size 2880.

Other GPUs and other sizes run with the same numbers; they are right everywhere, and best where they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_ON = "NVIDIA H200"


@dataclass(frozen=True)
class Tiles:
    """One projection's tile: `rows` of weights by `columns` of tokens.

    unroll: input tiles of 64 in one step of the loop; the largest divisor of their number up to this is taken.
    sums: independent sums, 1 or 2. stages: steps under way at once. warps: of a program.
    """

    rows: int
    columns: int
    unroll: int
    sums: int
    stages: int
    warps: int


# (path, tokens up to) -> tiles of gate_up, tiles of down; the first that fits. By weight format.
TABLE: dict[str, tuple[tuple[str, int, Tiles, Tiles], ...]] = {
    "mxfp4": (
        ("few", 1, Tiles(64, 8, 3, 2, 3, 2), Tiles(64, 8, 3, 2, 3, 2)),
        ("few", 48, Tiles(128, 8, 3, 1, 3, 4), Tiles(64, 8, 3, 1, 3, 2)),
        ("few", 1 << 30, Tiles(128, 32, 3, 1, 3, 4), Tiles(128, 32, 3, 1, 3, 4)),
        ("many", 1 << 30, Tiles(128, 128, 3, 1, 3, 4), Tiles(128, 128, 3, 1, 3, 4)),
    ),
    "float8_e4m3fn": (
        ("few", 48, Tiles(128, 8, 3, 1, 3, 4), Tiles(64, 8, 3, 1, 3, 2)),
        ("few", 1 << 30, Tiles(128, 32, 3, 1, 3, 4), Tiles(128, 32, 3, 1, 3, 4)),
        ("many", 1 << 30, Tiles(128, 128, 3, 1, 2, 4), Tiles(128, 128, 3, 1, 2, 4)),
    ),
    "bfloat16": (
        ("few", 48, Tiles(128, 8, 1, 1, 4, 4), Tiles(64, 8, 1, 1, 4, 2)),
        ("few", 1 << 30, Tiles(128, 32, 1, 1, 4, 4), Tiles(128, 32, 1, 1, 4, 4)),
        ("many", 1 << 30, Tiles(128, 256, 1, 1, 3, 8), Tiles(128, 256, 1, 1, 3, 8)),
    ),
}


def tiles(weight_format: str, path: str, tokens: int) -> tuple[Tiles, Tiles]:
    """Of gate_up and of down, for a path ("few" or "many") and a number of tokens."""
    return next((up, down) for name, most, up, down in TABLE[weight_format] if name == path and tokens <= most)


def divisor(tiles_of_inputs: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(n for n in range(min(most, tiles_of_inputs), 0, -1) if tiles_of_inputs % n == 0)
