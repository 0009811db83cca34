"""One result against the definition: the worst elements, each error in units of its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import torch

from npu_gptoss.verify.tolerances import Tolerance

WORST = 3  # elements that are shown


@dataclass(frozen=True)
class Element:
    """error: in units of the tolerance at this place; 1 is the limit."""

    output: str
    index: tuple[int, ...]
    got: float
    expected: float
    error: float

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        size = "not allowed at all" if self.error == inf else f"{self.error:.3g} times the tolerance"
        return f"{self.output}[{at}]: got {self.got:.7g}, expected {self.expected:.7g}: {size}"


@dataclass(frozen=True)
class Verdict:
    """wrong: how many of `elements` are off by more than the tolerance; worst: largest error first."""

    wrong: int
    elements: int
    worst: tuple[Element, ...]
    objection: str = ""  # what cannot be compared element by element: shapes, names of outputs

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.objection

    @property
    def error(self) -> float:
        """Of the worst element, in units of the tolerance."""
        return inf if self.objection else self.worst[0].error if self.worst else 0.0

    def lines(self) -> list[str]:
        head = self.objection or f"{self.wrong} of {self.elements} values differ"
        return [head, *(f"  {element}" for element in self.worst if element.error > 1)]


def errors(got: torch.Tensor, want: torch.Tensor, limit: Tolerance, size: torch.Tensor | None) -> torch.Tensor:
    """|got - want| in units of the tolerance, elementwise, float32; infinite for NaN and Inf that are not expected."""
    if limit.exact or not (got.dtype.is_floating_point or got.dtype.is_complex):
        # a value that is only moved: NaN equals itself
        same = got == want
        if got.dtype.is_floating_point:
            same |= got.isnan() & want.isnan()
        return torch.where(same, 0.0, inf)
    got, want = got.float(), want.float()
    allowed = limit.scale * (limit.atol + limit.rtol * want.abs())
    if want.numel():
        allowed = allowed + limit.of_largest * want.abs().max()
    if size is not None:
        allowed = allowed + limit.of_size * size.float()
    error = (got - want).abs() / allowed
    return torch.where(torch.isfinite(got) & torch.isfinite(error), error, inf)


def compare(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    limits: Mapping[str, Tolerance],
    sizes: Mapping[str, torch.Tensor] | None = None,
) -> Verdict:
    """All outputs of a call; tensors on the CPU."""
    verdict = Verdict(0, 0, ())
    if got.keys() != want.keys():
        return replace(verdict, objection=f"outputs {sorted(got)}, expected {sorted(want)}")
    for name, expected in want.items():
        mine = got[name]
        if mine.shape != expected.shape:
            return replace(verdict, objection=f"{name} is {list(mine.shape)}, expected {list(expected.shape)}")
        error = errors(mine, expected, limits[name], (sizes or {}).get(name))
        top = error.flatten().topk(min(WORST, error.numel()))
        places = [tuple(int(i) for i in torch.unravel_index(at, error.shape)) for at in top.indices]
        found = [
            Element(name, at, float(mine[at]), float(expected[at]), float(e))
            for at, e in zip(places, top.values, strict=True)
        ]
        worst = sorted((*verdict.worst, *found), key=lambda element: -element.error)[:WORST]
        verdict = Verdict(verdict.wrong + int((error > 1).sum()), verdict.elements + error.numel(), tuple(worst))
    return verdict
