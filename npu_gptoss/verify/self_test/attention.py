"""Attention calls that known defects of CANN's kernels get wrong.

The calls follow from the public history of CANN's attention operators: what was repaired, in which release, and which
shapes showed it (docs/running-on-910b.md has the table). From CANN 8.5 on another kernel runs behind the same call, so
a release must be checked even if the one before it was right.

Keys grow with their position, so the running maximum moves in every tile. Every head has another sink. The output
buffer holds NaN before the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from npu_gptoss.verify.attention_cases import WINDOW, Shape, Step, make_step
from npu_gptoss.verify.compare import Result, checked, compare
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.tolerances import ATTENTION_ROWS, EXACT

BLOCK, HEAD_DIM = 128, 64
SHAPE = Shape(heads=64, kv_heads=8, head_dim=HEAD_DIM, block_size=BLOCK)
UNUSED = 0.0  # in cache slots without a key, as in a server
SPARE_COLUMNS = 4  # of the block table: a server makes it as wide as the longest context
SINKS = (-4, 14)  # the last outweighs thousands of keys, so counting it twice shows
FULL_AND_WINDOW = (None, WINDOW)


@dataclass(frozen=True)
class Case:
    """One step. rows, lengths: query rows and keys of each request. windows: one call each. padding: rows of `out`
    after the last request. suspect: the defect that it shows, with its release. later: not at a server's start.
    one_group: the heads of one key head are enough, because the definition on the host takes most of the time."""

    name: str
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    windows: tuple[int | None, ...]
    suspect: str
    padding: int = 0
    later: bool = False
    one_group: bool = False


MERGED = (
    "CANN 8.3 as published does not rescale heads that it merges between tiles of 512 keys (ops-transformer "
    "4251efa76, repaired after 8.3.RC1's sources)"
)
SPLIT = "from CANN 8.5 on the keys of one request are split over cores, and the sink is counted once a part or lost"
BAND = (
    "the band of a window with sinks (ops-transformer c36036e63, nightly CANN of 25 to 30 March 2026), or a window "
    "that is cut by a tile of 512 keys"
)
EDGES = (1, 2, 64, 127, 128, 129, 512, 513, 639, 1030)
MASK = "the mask of a chunk whose first tile is hidden, or rows that are merged in a mixed batch"
CUMULATIVE = "lengths that are taken for cumulative ones (ops-transformer f2ed1423d, CANN 9.1)"
TAIL = "rows behind the last request are written over"
CASES = (
    Case("decode over tiles", (1,) * 4, (400, 513, 1100, 2000), (None,), MERGED),
    Case("one long request", (1,), (4097,), (None,), SPLIT),
    Case("windows at tile borders", (1,) * len(EDGES), EDGES, (WINDOW,), BAND),
    Case("a chunk beside decodes", (1, 520, 1, 37), (1100, 600, 3, 37), FULL_AND_WINDOW, MASK, one_group=True),
    Case(
        *("prompts, chunks and decodes together", (1, 700, 1, 37, 1, 513), (1100, 1600, 3, 37, 513, 640)),
        *(FULL_AND_WINDOW, MASK),
        later=True,
    ),
    Case("many equal lengths", (1,) * 48, (600,) * 48, (None,), CUMULATIVE, later=True),
    Case("rows behind the last request", (1, 1, 1), (5, 7, 9), FULL_AND_WINDOW, TAIL, padding=5, later=True),
)


def make_case(case: Case, heads: int, kv_heads: int, dtype: torch.dtype) -> Step:
    generator = torch.Generator().manual_seed(len(case.rows) + sum(case.lengths))
    requests = list(zip(case.rows, case.lengths, strict=True))
    shape = replace(SHAPE, heads=heads, kv_heads=kv_heads)
    step = make_step(requests, shape, generator, case.padding, UNUSED, SPARE_COLUMNS, key_sizes=(0.5, 3))
    # The first head of each group has the largest sink: a defect of sinks shows there too, unlike merged heads.
    step.sinks = torch.linspace(*reversed(SINKS), heads).view(-1, kv_heads).T.flatten()
    return step.to("cpu", dtype)


def results(rank: Rank) -> Iterator[Result]:
    """The calls with the heads of this rank."""
    for case in CASES:
        if not (case.later and rank.short):
            yield from results_of(case, rank)


def results_of(case: Case, rank: Rank) -> Iterator[Result]:
    """One case, once for each of its windows. The step's keys are written by the cache operator first."""
    groups = 1 if case.one_group else rank.kv_heads
    step = make_case(case, rank.heads // rank.kv_heads * groups, groups, rank.dtype)
    placed = step.written(rank.device)
    for window in case.windows:
        yield _result(case, step, placed, window, rank.repeats)


def _result(case: Case, step: Step, placed: Step, window: int | None, repeats: int) -> Result:
    layer = "a full layer" if window is None else f"a window of {window} keys"
    tokens = step.metadata.num_tokens

    def split(out: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": out[:tokens], "padding": out[tokens:]}

    want, limits = split(step.want(window)), {"out": ATTENTION_ROWS, "padding": EXACT}
    want["padding"] = torch.zeros_like(want["padding"])
    result, got = checked(
        f"attention, {case.name}, {layer}",
        lambda: split(placed.attend(window).cpu()),
        lambda got: compare(got, want, limits),
        repeats=repeats,
        suspect=case.suspect,
    )
    if result.wrong and got:
        return replace(result, merged_heads=_only_merged_heads(got["out"].float(), want["out"], step))
    return result


def _only_merged_heads(out: torch.Tensor, want: torch.Tensor, step: Step) -> bool:
    """The first head of each group is right and others are not, and every request has one row."""
    if step.metadata.max_query_len != 1 or not torch.isfinite(out).all():
        return False
    groups, limit = step.key_cache.shape[2], ATTENTION_ROWS.of_row
    by_head = (out - want).norm(dim=2).amax(0) / want.norm(dim=2).amax(0).clamp(min=1e-30)
    by_place = by_head.view(groups, -1).amax(0)
    return bool(by_place[0] <= limit) and bool((by_place[1:] > limit).any())
