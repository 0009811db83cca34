"""Attention calls that known defects of CANN's kernels get wrong, each against the definition.

The calls follow from the public history of CANN's attention operators: what was mended, in which release, and which
shapes showed it (docs/running-on-910b.md has the table). The kernel behind the same call changes from CANN 8.5 on, so
what one release computes rightly says nothing of the next.

Keys grow with their position, so that the running maximum moves in every tile; every head has another sink; the output
buffer holds NaN before; a call that is made again has to give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_gptoss.selftest.steps import HEAD_DIM, WINDOW, Placed, Step, deviation

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


@dataclass(frozen=True)
class Outcome:
    """What a call gave. deviation: of the worst row, relative; problem: empty when right."""

    case: Case
    window: int | None
    deviation: float
    problem: str
    merged_heads: bool = False  # only heads 1.. of each group are wrong, of requests of one row

    def sentence(self) -> str:
        layer = "a full layer" if self.window is None else f"a window of {self.window} keys"
        return f"attention, {self.case.name}, {layer}: {self.problem}; suspect: {self.case.suspect}"


def make_step(case: Case, heads: int, kv_heads: int, dtype: torch.dtype) -> Step:
    generator = torch.Generator().manual_seed(len(case.rows) + sum(case.lengths))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = [], []
    for length in case.lengths:
        size = torch.linspace(0.5, 3, length).view(-1, 1, 1)
        keys.append((normal(length, kv_heads, HEAD_DIM) * size).to(dtype))
        values.append(normal(length, kv_heads, HEAD_DIM).to(dtype))
    query = normal(sum(case.rows), heads, HEAD_DIM).to(dtype)
    sinks = torch.linspace(*SINKS, heads)[torch.randperm(heads, generator=generator)].to(dtype)
    return Step(query, keys, values, list(case.rows), sinks, case.padding)


def outcomes(
    case: Case,
    device: torch.device,
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    repeats: int,
    kernel: str | None = None,
) -> list[Outcome]:
    """The case on the device, once for each of its windows, `repeats` times each."""
    step = make_step(case, heads, kv_heads, dtype)
    placed = step.place(device, kernel)
    return [_outcome(case, step, placed, window, repeats, kernel) for window in case.windows]


def _outcome(case: Case, step: Step, placed: Placed, window: int | None, repeats: int, kernel: str | None) -> Outcome:
    want = step.want(window)
    got = placed.attend(window, kernel).cpu()
    tokens = len(step.query)
    found = deviation(got[:tokens], want[:tokens])
    if found > LIMIT:
        size = "NaN or Inf" if found == float("inf") else f"{found:.0%} from the definition"
        return Outcome(case, window, found, size, _only_merged_heads(got[:tokens], want[:tokens], step))
    if bool(got[tokens:].any()):
        return Outcome(case, window, found, "rows behind the last request came out other than zero")
    for repeat in range(1, repeats):
        if not torch.equal(placed.attend(window, kernel).cpu(), got):
            return Outcome(case, window, found, f"call {repeat + 1} of the same inputs gave other bits than the first")
    return Outcome(case, window, found, "")


def _only_merged_heads(got: torch.Tensor, want: torch.Tensor, step: Step) -> bool:
    """Whether the first head of each group is right and others are not, and every request has one row."""
    if any(rows != 1 for rows in step.rows) or not torch.isfinite(got).all():
        return False
    groups = step.keys[0].shape[1]
    by_head = (got.float() - want.float()).norm(dim=2).amax(0) / want.float().norm(dim=2).amax(0).clamp(min=1e-30)
    by_place = by_head.view(groups, -1).amax(0)
    return bool(by_place[0] <= LIMIT) and bool((by_place[1:] > LIMIT).any())
