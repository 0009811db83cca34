"""Attention calls that known defects of CANN's kernels get wrong, each against the definition.

The calls follow from the public history of CANN's attention operators: what was mended, in which release, and which
shapes showed it (docs/running-on-910b.md has the table). The kernel behind the same call changes from CANN 8.5 on, so
what one release computes rightly says nothing of the next.

Keys grow with their position, so that the running maximum moves in every tile; every head has another sink; the output
buffer holds NaN before; a call that is made again has to give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from npu_gptoss.selftest.outcome import Outcome, deviation, judged, repeated
from npu_gptoss.verify.cases import WINDOW, Shape, Step, make_step

BLOCK, HEAD_DIM = 128, 64
RANK = Shape(heads=64, kv_heads=8, head_dim=HEAD_DIM, block_size=BLOCK)
UNUSED = 0.0  # what a server's cache holds where nothing was written
SPARE_COLUMNS = 4  # of the block table, which serving makes as wide as the longest context
LIMIT = 0.01  # of the worst row, relative to the largest; bfloat16 rounds up to 0.3 %, every defect makes 10 % and more
SINKS = (-4, 14)  # the last outweighs thousands of keys, so that it shows when it is counted twice
FULL_AND_WINDOW = (None, WINDOW)


@dataclass(frozen=True)
class Case:
    """One call. rows, lengths: query rows and keys of each request; windows: one call each; padding: rows of `out`
    behind the last request; suspect: whose defect it shows, with the release."""

    name: str
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    windows: tuple[int | None, ...]
    suspect: str
    padding: int = 0
    at_start: bool = True
    one_group: bool = False  # the heads of one key head are enough: the definition on the host is the slow part


CASES = (
    Case(
        "decode over tiles",
        (1, 1, 1, 1),
        (400, 513, 1100, 2000),
        (None,),
        "CANN 8.3 as published does not rescale heads that it merges between tiles of 512 keys "
        "(ops-transformer 4251efa76, mended after 8.3.RC1's sources)",
    ),
    Case(
        "one long request",
        (1,),
        (4097,),
        (None,),
        "from CANN 8.5 on the keys of one request are split over cores, and the sink is counted once a part or lost",
    ),
    Case(
        "windows at tile borders",
        (1,) * 10,
        (1, 2, 64, 127, 128, 129, 512, 513, 639, 1030),
        (WINDOW,),
        "the band of a window with sinks (ops-transformer c36036e63, nightly CANN of 25 to 30 March 2026), or a window "
        "that is cut by a tile of 512 keys",
    ),
    Case(
        "a chunk beside decodes",
        (1, 520, 1, 37),
        (1100, 600, 3, 37),
        FULL_AND_WINDOW,
        "the mask of a chunk whose first tile is hidden, or rows that are merged in a mixed batch",
        one_group=True,
    ),
    Case(
        "prompts, chunks and decodes together",
        (1, 700, 1, 37, 1, 513),
        (1100, 1600, 3, 37, 513, 640),
        FULL_AND_WINDOW,
        "the mask of a chunk whose first tile is hidden, or rows that are merged in a mixed batch",
        at_start=False,
    ),
    Case(
        "many equal lengths",
        (1,) * 48,
        (600,) * 48,
        (None,),
        "lengths that are taken for cumulative ones (ops-transformer f2ed1423d, CANN 9.1)",
        at_start=False,
    ),
    Case(
        "rows behind the last request",
        (1, 1, 1),
        (5, 7, 9),
        FULL_AND_WINDOW,
        "rows behind the last request are written over",
        padding=5,
        at_start=False,
    ),
)


def make_case(case: Case, heads: int, kv_heads: int, dtype: torch.dtype) -> Step:
    generator = torch.Generator().manual_seed(len(case.rows) + sum(case.lengths))
    requests = list(zip(case.rows, case.lengths, strict=True))
    shape = replace(RANK, heads=heads, kv_heads=kv_heads)
    step = make_step(requests, shape, generator, case.padding, UNUSED, SPARE_COLUMNS, key_sizes=(0.5, 3))
    # the first head of each group has the largest: a defect of sinks shows there too, and is not taken for merged heads
    step.sinks = torch.linspace(*reversed(SINKS), heads).view(-1, kv_heads).T.flatten()
    return step.to("cpu", dtype)


def outcomes(
    case: Case,
    device: torch.device,
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    repeats: int,
) -> list[Outcome]:
    """The case on the device, once for each of its windows, `repeats` times each."""
    step = make_case(case, heads, kv_heads, dtype)
    placed = step.written(device)
    return [_outcome(case, step, placed, window, repeats) for window in case.windows]


def _outcome(case: Case, step: Step, placed: Step, window: int | None, repeats: int) -> Outcome:
    def attend() -> torch.Tensor:
        return placed.attend(window).cpu()

    want, got = step.want(window), attend()
    tokens = step.metadata.num_tokens
    layer = "a full layer" if window is None else f"a window of {window} keys"
    found = deviation(got[:tokens], want[:tokens])
    outcome = judged(f"attention, {case.name}, {layer}", case.suspect, found, LIMIT)
    if outcome.problem:
        return replace(outcome, merged_heads=_only_merged_heads(got[:tokens], want[:tokens], step))
    if bool(got[tokens:].any()):
        return replace(outcome, problem="rows behind the last request came out other than zero")
    return repeated(outcome, repeats, lambda: [attend()], [got])


def _only_merged_heads(got: torch.Tensor, want: torch.Tensor, step: Step) -> bool:
    """Whether the first head of each group is right and others are not, and every request has one row."""
    if step.metadata.max_query_len != 1 or not torch.isfinite(got).all():
        return False
    groups = step.key_cache.shape[2]
    by_head = (got.float() - want.float()).norm(dim=2).amax(0) / want.float().norm(dim=2).amax(0).clamp(min=1e-30)
    by_place = by_head.view(groups, -1).amax(0)
    return bool(by_place[0] <= LIMIT) and bool((by_place[1:] > LIMIT).any())
