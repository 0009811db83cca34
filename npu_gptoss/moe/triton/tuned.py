"""Sizes of the kernels' tiles, from the table of the GPU, and for how many tokens each counts.

They were measured for hidden and intermediate size 2880. Other sizes run with the same numbers, which are right.
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_gptoss.kernels.tiles import tile

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
# By weight format, the paths and up to how many tokens a tile of the table counts; the first that fits.
POINTS: dict[str, tuple[tuple[str, int], ...]] = {
    "mxfp4": (("few", 1), ("few", 48), ("few", UNBOUNDED), ("many", 512), ("many", UNBOUNDED)),
    "float8_e4m3fn": (("few", 1), ("few", 48), ("few", UNBOUNDED), ("many", 512), ("many", UNBOUNDED)),
    "bfloat16": (("few", 1), ("few", 48), ("few", UNBOUNDED), ("many", UNBOUNDED)),
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


# Pairs to an expert, at least; the first that fits. Fewer: the Triton kernels.
GLUON = (1536, 256)


@dataclass(frozen=True)
class OneTiles:
    """A tile of `one_hopper`: 16 rows of weights for each warp.

    deep, down_deep: steps of 256 inputs that a thread holds in its registers, in gate_up and in down.
    splits: shares of the inputs that `down` sums apart. registers: of a thread, at most: what three programs
    leave no room for a fourth with.
    """

    warps: int
    deep: int
    down_deep: int
    splits: int
    registers: int


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


# Tokens up to; the first that fits. More tokens: the Triton kernels.
FEW = (3, 6, 48)
MOST_SLOTS = 8  # of FewTiles


def one_gluon_tiles() -> OneTiles:
    return tile("moe.one", OneTiles)


def few_gluon_tiles(tokens: int) -> FewTiles:
    return tile(f"moe.few.{next(most for most in FEW if tokens <= most)}", FewTiles)


def gluon_tiles(slots: int, experts: int) -> GluonTiles:
    return tile(f"moe.many.{next((least for least in GLUON if slots >= least * experts), GLUON[-1])}", GluonTiles)


def tiles(weight_format: str, path: str, tokens: int) -> tuple[Tiles, Tiles]:
    """Returns the tiles of gate_up and of down, for a path ("few" or "many") and a number of tokens."""
    most = next(most for name, most in POINTS[weight_format] if name == path and tokens <= most)
    name = f"moe.{weight_format}.{path}.{'more' if most == UNBOUNDED else most}"
    return tile(f"{name}.gate_up", Tiles), tile(f"{name}.down", Tiles)


def unroll(tiles_of_inputs: int, most: int) -> int:
    """2 for 2; else the largest divisor up to `most`."""
    if most == 2:
        return 2
    return next(n for n in range(min(most, tiles_of_inputs), 0, -1) if tiles_of_inputs % n == 0)
