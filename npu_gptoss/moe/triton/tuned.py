"""Sizes of the kernels' tiles: the one table. Measured on one NVIDIA H200, for hidden and intermediate size 2880.

Other GPUs and other sizes run with the same numbers; they are right everywhere, and best where they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Tiles:
    """One projection's tile: `rows` of weights by `columns` of tokens.

    unroll: input tiles of 64 in one step of the loop: 2, or the largest divisor of their number up to this.
    stages: steps under way at once. warps: of a program.
    splits: shares of the inputs that `down` sums apart, for more programs in small batches.
    """

    rows: int
    columns: int
    unroll: int
    stages: int
    warps: int
    splits: int = 1


# A single token has few programs, all under way at once. Their stages fill a third of a multiprocessor's shared memory,
# so that no more than three come to one: programs that start while the previous kernel ends are dealt out unevenly, and
# a multiprocessor with eight of them is what everybody waits for (in the engine a layer took 113 instead of 93 us).
# (path, tokens up to) -> tiles of gate_up, tiles of down; the first that fits. By weight format.
TABLE: dict[str, tuple[tuple[str, int, Tiles, Tiles], ...]] = {
    "mxfp4": (
        ("few", 1, Tiles(64, 8, 2, 10, 4), Tiles(64, 8, 2, 10, 4, splits=2)),
        ("few", 48, Tiles(64, 8, 2, 4, 2), Tiles(64, 8, 2, 4, 2)),
        ("few", UNBOUNDED, Tiles(128, 32, 2, 4, 4), Tiles(128, 32, 2, 4, 4)),
        ("many", 512, Tiles(128, 64, 1, 4, 4), Tiles(128, 64, 1, 4, 4)),
        ("many", UNBOUNDED, Tiles(128, 128, 2, 3, 4), Tiles(128, 128, 2, 3, 4)),
    ),
    "float8_e4m3fn": (
        ("few", 1, Tiles(64, 8, 3, 5, 4), Tiles(64, 8, 3, 5, 4, splits=2)),
        ("few", 48, Tiles(128, 8, 3, 3, 4), Tiles(64, 8, 3, 3, 2)),
        ("few", UNBOUNDED, Tiles(128, 32, 3, 3, 4), Tiles(128, 32, 3, 3, 4)),
        ("many", 512, Tiles(128, 64, 2, 3, 4), Tiles(128, 64, 2, 3, 4)),
        ("many", UNBOUNDED, Tiles(128, 128, 1, 3, 4), Tiles(128, 128, 1, 3, 4)),
    ),
    "bfloat16": (
        ("few", 1, Tiles(64, 8, 1, 8, 4), Tiles(64, 8, 1, 8, 4, splits=2)),
        ("few", 48, Tiles(128, 8, 1, 4, 4), Tiles(64, 8, 1, 4, 2)),
        ("few", UNBOUNDED, Tiles(128, 32, 1, 4, 4), Tiles(128, 32, 1, 4, 4)),
        ("many", UNBOUNDED, Tiles(128, 256, 1, 3, 8), Tiles(128, 256, 1, 3, 8)),
    ),
}


@dataclass(frozen=True)
class GluonTiles:
    """A tile of `many_hopper`: `rows` of weights for each of its two groups of warps by `columns` of slots.

    stages: steps under way at once. compute, fetch: registers of a thread that computes and of one that fetches.
    """

    rows: int
    columns: int
    stages: int
    compute: int
    fetch: int


# (pairs to an expert, at least) -> tiles; the first that fits. Fewer: the Triton kernels.
GLUON: tuple[tuple[int, GluonTiles], ...] = (
    (1536, GluonTiles(64, 256, 5, 208, 88)),
    (256, GluonTiles(128, 128, 7, 224, 56)),
)


@dataclass(frozen=True)
class OneTiles:
    """A tile of `one_hopper`: 16 rows of weights for each warp.

    deep, down_deep: steps of 256 inputs that a thread holds in its registers, in gate_up and in down.
    splits: shares of the inputs that `down` sums apart. registers: of a thread, at most; what three programs leave no
    fourth (see TABLE) and need no shared memory for.
    """

    warps: int
    deep: int
    down_deep: int
    splits: int
    registers: int


ONE = OneTiles(warps=4, deep=4, down_deep=6, splits=2, registers=168)


@dataclass(frozen=True)
class FewTiles:
    """A tile of `few_hopper`: `rows` of weights (16 to 128) by `slots` of an expert (2, 4 or 8).

    warps: of a program; each has 16 of the rows or a multiple. deep: steps of 128 inputs that a thread holds in its
    registers. registers: of a thread, at most.
    """

    slots: int
    rows: int
    warps: int
    deep: int
    registers: int


# (tokens up to) -> tiles; the first that fits. More tokens: the Triton kernels.
FEW: tuple[tuple[int, FewTiles], ...] = (
    (3, FewTiles(slots=4, rows=64, warps=4, deep=6, registers=168)),
    (6, FewTiles(slots=4, rows=64, warps=4, deep=3, registers=96)),
    (48, FewTiles(slots=8, rows=64, warps=4, deep=5, registers=128)),
)


def few_gluon_tiles(tokens: int) -> FewTiles:
    return next(shape for most, shape in FEW if tokens <= most)


def gluon_tiles(slots: int, experts: int) -> GluonTiles:
    return next((shape for least, shape in GLUON if slots >= least * experts), GLUON[-1][1])


def tiles(weight_format: str, path: str, tokens: int) -> tuple[Tiles, Tiles]:
    """Of gate_up and of down, for a path ("few" or "many") and a number of tokens."""
    return next((up, down) for name, most, up, down in TABLE[weight_format] if name == path and tokens <= most)


def unroll(tiles_of_inputs: int, most: int) -> int:
    """2 for 2; else the largest divisor up to `most`."""
    if most == 2:
        return 2
    return next(n for n in range(min(most, tiles_of_inputs), 0, -1) if tiles_of_inputs % n == 0)
