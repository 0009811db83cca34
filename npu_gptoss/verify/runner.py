"""Which kernels there are to verify here, and what came of each: calls that failed, mistakes that were not caught."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import ANY, KernelSpec, Priority, current_platform, signature
from npu_gptoss.kernels.registry import BUILT_IN, registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.verify.calls import Call, CallSpec, Check, not_made, specs_of
from npu_gptoss.verify.cases import mapped, on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.known_failures import KNOWN_FAILURES, KnownFailure
from npu_gptoss.verify.mutations import Outputs

ERROR_LINES = 6  # of a kernel's own error, behind its first
PASSED, FAILED, KNOWN, UNEXPECTED = "passed", "failed", "known failure", "unexpected pass"


@dataclass(frozen=True)
class Target:
    """A kernel, or a function of ours, with its check; without one nothing can be said of it."""

    name: str
    check: Check | None
    kernel: KernelSpec | None
    origin: str


@dataclass(frozen=True)
class CallResult:
    """error: of the worst element in units of the tolerance. lines: what was wrong, or why the failure is known."""

    call: str
    dtypes: str
    state: str
    error: float
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class MutationResult:
    """caught_by: the call that shows it, "" for none; shown: whether any call could; error: of the worst element."""

    name: str
    dtypes: str
    caught_by: str
    shown: bool
    error: float

    @property
    def ok(self) -> bool:
        return bool(self.caught_by) or not self.shown


@dataclass
class Report:
    """Of one target. reasons: reasons why nothing or not everything could be verified, which fail it."""

    target: Target
    calls: list[CallResult] = field(default_factory=list)
    mutations: list[MutationResult] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        bad = any(call.state in (FAILED, UNEXPECTED) for call in self.calls)
        return not bad and not self.reasons and all(mutation.ok for mutation in self.mutations)


def matches(text: str, target: Target) -> bool:
    """A part of the kernel's, operation's or package's name, or a pattern as of a shell."""
    check = target.check.name if target.check else ""
    return any(text in name or fnmatchcase(name, text) for name in (target.name, check, target.origin) if name)


def targets(device: torch.device, wanted: str | None = None) -> tuple[list[Target], dict[str, str]]:
    """What can run here, by name, and why each of the others cannot. Raises InputError where nothing is asked for."""
    found, elsewhere = [], {}
    for kernel in registry.kernels.values():
        target = Target(kernel.name, CHECKS.get(f"{kernel.family}.{kernel.mode}"), kernel, kernel.origin)
        if wanted is not None and not matches(wanted, target):
            continue
        reasons = kernel.capability.reasons_against(current_platform())
        if reasons:
            elsewhere[kernel.name] = "; ".join(reasons)
        elif kernel.priority == Priority.REFERENCE and kernel.origin == BUILT_IN and device.type == "cpu":
            elsewhere[kernel.name] = "is the definition itself"
        else:
            found.append(target)
    functions = [Target(check.name, check, None, BUILT_IN) for check in CHECKS.values() if check.operation is None]
    found += [target for target in functions if wanted is None or matches(wanted, target)]
    if not found:
        names = ", ".join(sorted([*registry.kernels, *(s.name for s in functions)]))
        if elsewhere:
            why = "; ".join(f"{name} {reason}" for name, reason in sorted(elsewhere.items()))
            raise InputError(f"nothing that {wanted!r} names can be verified here: {why}")
        raise InputError(f"{wanted!r} names no kernel: expected a part of one of these names, or a pattern: {names}")
    return sorted(found, key=lambda s: s.name), elsewhere


def verify(
    target: Target,
    device: torch.device,
    *,
    seed: int,
    cases: int,
    mutate: bool = False,
    ledger: Sequence[KnownFailure] = KNOWN_FAILURES,
) -> Report:
    """All calls of one target; with `mutate` also whether each known mistake would have been found by them."""
    report, check = Report(target), target.check
    if check is None:
        kernel = target.kernel
        report.reasons.append(f"there is no check of the operation {kernel.family}.{kernel.mode}")
        return report
    for spec in _specs(target, seed, cases):
        kept: list[tuple[Call, Outputs, Outputs | None, Outputs]] = []
        for call in fitting(target, check.calls(spec), spec):
            want = check.definition(call.inputs)
            sizes = check.sizes(call.inputs) if check.sizes and spec.precision == "bfloat16" else None
            result, got = _judged(target, check, call, spec, want, sizes, device, ledger)
            report.calls.append(result)
            if mutate and result.state == PASSED:
                kept.append((call, want, sizes, got))
        if mutate and kept:
            report.mutations += _mutations(check, kept, spec)
    if not report.calls:
        report.reasons.append(_nothing_fits(target))
    elif target.kernel is not None and (left := list(not_made(target.kernel, check))):
        report.notes.append(f"not verified in {', '.join(left)}: no such calls are made here")
    return report


def _specs(target: Target, seed: int, cases: int) -> Iterator[CallSpec]:
    if target.kernel is not None:
        yield from specs_of(target.kernel, target.check, seed, cases)
        return
    ((role, dtypes),) = target.check.dtypes.items()
    for dtype in dtypes:
        yield CallSpec({role: dtype}, {}, seed, cases)


def fitting(target: Target, calls: Iterator[Call], spec: CallSpec) -> Iterator[Call]:
    """Those that the kernel says it takes: selection would give it no others."""
    for call in calls:
        if target.kernel is None or not reasons_against(
            target.kernel, signature(**spec.roles), call.traits, current_platform()
        ):
            yield call


def _nothing_fits(target: Target) -> str:
    stated = "; ".join(
        f"{trait} {'any' if values is ANY else sorted(values, key=str)}"
        for trait, values in target.kernel.traits.items()
    )
    missing = ", ".join(not_made(target.kernel, target.check))
    return f"no call fits what it takes: {stated or 'no traits'}" + (f"; not made here: {missing}" if missing else "")


def _judged(
    target: Target,
    check: Check,
    call: Call,
    spec: CallSpec,
    want: Outputs,
    sizes: Outputs | None,
    device: torch.device,
    ledger: Sequence[KnownFailure],
) -> tuple[CallResult, Outputs]:
    try:
        got = mapped(check.run(on(call.inputs, device), target.name), lambda t: t.cpu())
        verdict = check.judge(got, want, spec.precision, sizes)
        ok, error, lines = verdict.ok, verdict.error, verdict.lines()
    except Exception as failure:  # a kernel's own error is what is reported here
        where = traceback.extract_tb(failure.__traceback__)[-1]
        first, *more = str(failure).splitlines() or [""]
        place = f"{where.name}, line {where.lineno} of {where.filename}"
        lines = [f"{type(failure).__name__}: {first} ({place})", *more[:ERROR_LINES]]
        got, ok, error = {}, False, inf
    platform = current_platform().kind
    known = next((entry for entry in ledger if entry.covers(target.name, call.name, platform)), None)
    if known is not None:
        state = UNEXPECTED if ok else KNOWN
        lines = [f"{'it passes now; take it out of the ledger' if ok else 'known'}: {known.reason}"]
    else:
        state = PASSED if ok else FAILED
    return CallResult(call.name, str(spec), state, error, () if state == PASSED else tuple(lines)), got


def _mutations(
    check: Check, kept: list[tuple[Call, Outputs, Outputs | None, Outputs]], spec: CallSpec
) -> Iterator[MutationResult]:
    """Each in the calls that the kernel passed, until one shows it: what it would answer, rounded as the kernel's."""
    for mutation in check.mutations:
        shown, largest, caught = False, 0.0, ""
        for call, want, sizes, got in kept:
            wrong = mutation.answer(call.inputs, check.definition)
            if wrong is None:
                continue
            shown = True
            rounded = {name: tensor.to(got[name].dtype) for name, tensor in wrong.items()}
            verdict = check.judge(rounded, want, spec.precision, sizes)
            largest = max(largest, verdict.error)
            if not verdict.ok:
                caught = call.name
                break
        yield MutationResult(mutation.name, str(spec), caught, shown, largest)
