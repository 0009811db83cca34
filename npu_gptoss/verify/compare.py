"""Compares results with the definition: one comparer and one kind of result for all depths of checking."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

import torch

from npu_gptoss.verify.tolerances import ROWS, Tolerance

Outputs = Mapping[str, torch.Tensor]

WORST = 3  # elements that are shown
ERROR_LINES = 6  # of an exception, after its first line
PASSED, FAILED, KNOWN, UNEXPECTED = "passed", "failed", "known failure", "unexpected pass"


@dataclass(frozen=True)
class Element:
    """One element, or one row where rows are compared: `got` and `expected` are then norms.

    error: in units of the tolerance at this place; 1 is the limit. of_row: the limit that a row was compared with.
    """

    output: str
    index: tuple[int, ...]
    got: float
    expected: float
    error: float
    of_row: float = 0.0

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        size = "not allowed at all" if self.error == inf else f"{self.error:.3g} times the tolerance"
        return f"{self.output}[{at}]: got {self.got:.7g}, expected {self.expected:.7g}: {size}"


@dataclass(frozen=True)
class Verdict:
    """The comparison of all outputs of one call. wrong: elements beyond the tolerance. worst: largest error first.

    objection: a difference of names or shapes, which leaves no elements to compare.
    """

    wrong: int
    elements: int
    worst: tuple[Element, ...]
    objection: str = ""

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.objection

    @property
    def error(self) -> float:
        """The error of the worst element, in units of the tolerance."""
        return inf if self.objection else self.worst[0].error if self.worst else 0.0

    def lines(self) -> list[str]:
        if self.objection:
            return [self.objection]
        if self.worst and (limit := self.worst[0].of_row):
            return ["NaN or Inf" if self.error == inf else f"{self.error * limit:.0%} from the definition"]
        head = f"{self.wrong} of {self.elements} values differ"
        return [head, *(f"  {element}" for element in self.worst if element.error > 1)]


@dataclass(frozen=True)
class Result:
    """The outcome of one call, at any depth.

    error: of the worst element, in units of the tolerance. lines: the differences, most important first. suspect: the
    known defect that a wrong result of this call points to, with its release. merged_heads: a wrong result has the
    pattern of attention heads that are merged without a factor.
    """

    call: str
    state: str
    error: float
    lines: tuple[str, ...] = ()
    dtypes: str = ""
    suspect: str = ""
    merged_heads: bool = False

    @property
    def wrong(self) -> bool:
        return self.state in (FAILED, UNEXPECTED)

    def failed(self, line: str) -> Result:
        """The same call, found wrong for another reason."""
        return replace(self, state=FAILED, lines=(line,))

    def sentence(self) -> str:
        return f"{self.call}: {self.lines[0]}; suspect: {self.suspect}"


def errors(got: torch.Tensor, want: torch.Tensor, limit: Tolerance, size: torch.Tensor | None) -> torch.Tensor:
    """|got - want| in units of the tolerance, float32; infinite for NaN and Inf that are not expected.

    One value an element; one a row, [rows], where the tolerance is a share of the largest row.
    """
    if limit.exact or not (got.dtype.is_floating_point or got.dtype.is_complex):
        # a value that is only moved: NaN equals itself
        same = got == want
        if got.dtype.is_floating_point:
            same |= got.isnan() & want.isnan()
        return torch.where(same, 0.0, inf)
    got, want = got.float(), want.float()
    if limit.of_row:
        rows, wanted = got.flatten(1), want.flatten(1)
        error = (rows - wanted).norm(dim=1) / (limit.of_row * wanted.norm(dim=1).max().clamp(min=1e-30))
        return torch.where(torch.isfinite(rows).all(1), error, inf)
    allowed = limit.scale * (limit.atol + limit.rtol * want.abs())
    if want.numel():
        allowed = allowed + limit.of_largest * want.abs().max()
    if size is not None:
        allowed = allowed + limit.of_size * size.float()
    error = (got - want).abs() / allowed
    return torch.where(torch.isfinite(got) & torch.isfinite(error), error, inf)


def _number(value: torch.Tensor) -> float:
    """The norm of a row."""
    return float(value.float().norm()) if value.dim() else float(value)


def compare(got: Outputs, want: Outputs, limits: Mapping[str, Tolerance], sizes: Outputs | None = None) -> Verdict:
    """All outputs of a call; tensors on the CPU."""
    verdict = Verdict(0, 0, ())
    if got.keys() != want.keys():
        return replace(verdict, objection=f"outputs {sorted(got)}, expected {sorted(want)}")
    for name, expected in want.items():
        mine, limit = got[name], limits[name]
        if mine.shape != expected.shape:
            return replace(verdict, objection=f"{name} is {list(mine.shape)}, expected {list(expected.shape)}")
        error = errors(mine, expected, limit, (sizes or {}).get(name))
        top = error.flatten().topk(min(WORST, error.numel()))
        places = [tuple(int(i) for i in torch.unravel_index(at, error.shape)) for at in top.indices]
        found = [
            Element(name, at, _number(mine[at]), _number(expected[at]), float(e), limit.of_row)
            for at, e in zip(places, top.values, strict=True)
        ]
        worst = sorted((*verdict.worst, *found), key=lambda element: -element.error)[:WORST]
        verdict = Verdict(verdict.wrong + int((error > 1).sum()), verdict.elements + error.numel(), tuple(worst))
    return verdict


def checked(
    call: str,
    run: Callable[[], Outputs],
    judge: Callable[[Outputs], Verdict],
    *,
    repeats: int = 1,
    dtypes: str = "",
    suspect: str = "",
) -> tuple[Result, Outputs]:
    """Runs one call, compares it, and repeats a right one: every repetition must give the same bits.

    run: returns outputs on the CPU. An exception of a kernel, an operator or a driver is a wrong result.
    """
    result, got = Result(call, PASSED, 0.0, (), dtypes, suspect), {}
    try:
        got = run()
        verdict = judge(got)
        result = replace(result, error=verdict.error)
        if not verdict.ok:
            return replace(result, state=FAILED, lines=tuple(verdict.lines())), got
        for repeat in range(1, repeats):
            again = run()
            if not all(torch.equal(again[name], tensor) for name, tensor in got.items()):
                return result.failed(f"call {repeat + 1} of the same inputs gave other bits than the first"), got
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        first, *more = str(failure).splitlines() or [""]
        place = f"{where.name}, line {where.lineno} of {where.filename}"
        lines = (f"{type(failure).__name__}: {first} ({place})", *more[:ERROR_LINES])
        return replace(result, state=FAILED, error=inf, lines=lines), {}
    return result, got


def by_rows(want: Outputs) -> Callable[[Outputs], Verdict]:
    """Judges outputs by the tolerance of rows, as the self-tests do."""
    return lambda got: compare(got, want, dict.fromkeys(want, ROWS))
