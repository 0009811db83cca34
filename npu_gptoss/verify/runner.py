"""Runs the checks: kernels and functions against the definition, and the self-tests of a card.

A server's start and the doctor call self-tests directly (`self_test`), the former the short ones. `npu-gptoss verify`
calls everything: all edge shapes and random calls of each kernel, and the self-tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any

import torch

from npu_gptoss.engine.device import kernels_for, one_thread
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import ANY, KernelSpec, Priority, current_platform, load_kernels, signature
from npu_gptoss.kernels.dumping import changed
from npu_gptoss.kernels.registry import BUILT_IN, registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.verify.calls import Call, CallSpec, Check, not_made, specs_of
from npu_gptoss.verify.cases import on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.compare import FAILED, KNOWN, PASSED, UNEXPECTED, Outputs, Result, checked
from npu_gptoss.verify.known_failures import KNOWN_FAILURES, KnownFailure
from npu_gptoss.verify.rank import whole
from npu_gptoss.verify.self_test.all import HARMLESS, SELF_TESTS, not_here

SELF_TEST = "self-test."  # before the names of self-tests
REPEATS = 5  # of a right call of a self-test


@dataclass(frozen=True)
class Target:
    """A kernel, a function or a self-test, with its check. A kernel without a check cannot be verified."""

    name: str
    check: Check | None
    kernel: KernelSpec | None
    origin: str = BUILT_IN

    @property
    def self_test(self) -> str:
        """The name in SELF_TESTS; empty for a kernel or a function."""
        return self.name.removeprefix(SELF_TEST) if self.name.startswith(SELF_TEST) else ""


@dataclass(frozen=True)
class MutationResult:
    """caught_by: the call that shows it, "" for none; shown: any call could; error: of the worst element."""

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
    """All results of one target. reasons: why it could not be verified, which fails it. details: of `compiled`."""

    target: Target
    calls: list[Result] = field(default_factory=list)
    mutations: list[MutationResult] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        bad = any(call.wrong for call in self.calls)
        return not bad and not self.reasons and all(mutation.ok for mutation in self.mutations)


def matches(text: str, target: Target) -> bool:
    """A part of the kernel's, operation's or package's name, or a pattern as of a shell."""
    check = target.check.name if target.check else ""
    return any(text in name or fnmatchcase(name, text) for name in (target.name, check, target.origin) if name)


def targets(device: torch.device, wanted: str | None = None) -> tuple[list[Target], dict[str, str]]:
    """The targets that can run here, and the reason against each other one. Raises InputError where none is named."""
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
    others = [Target(check.name, check, None) for check in CHECKS.values() if check.operation is None]
    others += [Target(SELF_TEST + name, None, None) for name in SELF_TESTS]
    for target in others:
        if wanted is None or matches(wanted, target):
            if reason := not_here(target.self_test, device):
                elsewhere[target.name] = reason
            else:
                found.append(target)
    if not found:
        names = ", ".join(sorted([*registry.kernels, *(target.name for target in others)]))
        if elsewhere:
            why = "; ".join(f"{name} {reason}" for name, reason in sorted(elsewhere.items()))
            raise InputError(f"nothing that {wanted!r} names can be verified here: {why}")
        raise InputError(f"{wanted!r} names no kernel: expected a part of one of these names, or a pattern: {names}")
    return sorted(found, key=lambda target: target.name), elsewhere


def verify(target: Target, device: torch.device, *, seed: int, cases: int, **options: Any) -> Report:
    """All calls of one target. options: of `verify_spec`."""
    return _whole(target, (verify_spec(target, spec, device, **options) for spec in _specs(target, seed, cases)))


def _whole(target: Target, parts: Iterable[Report]) -> Report:
    """One report of those of a target's specs."""
    report = Report(target)
    for part in parts:
        report.calls += part.calls
        report.mutations += part.mutations
        report.notes += part.notes
    if target.self_test:
        return report
    if target.check is None:
        kernel = target.kernel
        report.reasons.append(f"there is no check of the operation {kernel.family}.{kernel.mode}")
    elif not report.calls:
        report.reasons.append(_nothing_fits(target))
    elif target.kernel is not None and (left := list(not_made(target.kernel, target.check))):
        report.notes.append(f"not verified in {', '.join(left)}: no such calls are made here")
    return report


def verify_spec(
    target: Target,
    spec: CallSpec | None,
    device: torch.device,
    *,
    mutate: bool = False,
    ledger: Sequence[KnownFailure] = KNOWN_FAILURES,
) -> Report:
    """The calls of one spec of a target; None: of its self-test. mutate: also checks that each known mistake would have
    been found by them."""
    report, check = Report(target), target.check
    if spec is None:
        found = SELF_TESTS[target.self_test](whole(device, REPEATS))
        report.calls += [_named(result) for result in found]
        if target.self_test in HARMLESS:
            report.notes += [line for result in report.calls for line in result.lines]
            report.calls = [result for result in report.calls if not result.wrong]
        return report
    kept: list[tuple[Call, Outputs, Outputs | None, Outputs]] = []
    for call in fitting(target, check.calls(spec), spec):
        want, sizes = check.wanted(call.inputs, spec.precision)
        result, got = checked(
            call.name,
            lambda call=call: changed(check.run(on(call.inputs, device), target.name), lambda t: t.cpu()),
            lambda got, want=want, sizes=sizes: check.judge(got, want, spec.precision, sizes),
            dtypes=str(spec),
        )
        report.calls.append(_by_ledger(result, target, ledger))
        if mutate and report.calls[-1].state == PASSED:
            kept.append((call, want, sizes, got))
    if kept:
        report.mutations += _mutations(check, kept, spec)
    return report


def _named(result: Result) -> Result:
    """Returns a wrong result with its suspect among the lines."""
    if result.wrong and result.suspect:
        return replace(result, lines=(*result.lines, f"suspect: {result.suspect}"))
    return result


def _specs(target: Target, seed: int, cases: int) -> Iterator[CallSpec | None]:
    """None for a self-test."""
    if target.self_test:
        yield None
        return
    if target.check is None:
        return
    if target.kernel is not None:
        yield from specs_of(target.kernel, target.check, seed, cases)
        return
    ((role, dtypes),) = target.check.dtypes.items()
    for dtype in dtypes:
        yield CallSpec({role: dtype}, {}, seed, cases)


def fitting(target: Target, calls: Iterator[Call], spec: CallSpec) -> Iterator[Call]:
    """The calls that the kernel says it takes: selection would give it no others."""
    for call in calls:
        if target.kernel is None or not reasons_against(
            target.kernel, signature(**spec.roles), call.traits, current_platform()
        ):
            yield call


def _nothing_fits(target: Target) -> str:
    traits = target.kernel.traits.items()
    stated = "; ".join(f"{name} {'any' if values is ANY else sorted(values, key=str)}" for name, values in traits)
    missing = ", ".join(not_made(target.kernel, target.check))
    return f"no call fits its traits: {stated or 'no traits'}" + (f"; not made here: {missing}" if missing else "")


def _by_ledger(result: Result, target: Target, ledger: Sequence[KnownFailure]) -> Result:
    """The result of a call that the ledger names: a known failure, or a pass that it did not expect."""
    platform = current_platform().kind
    known = next((entry for entry in ledger if entry.covers(target.name, result.call, platform)), None)
    if known is None:
        return result
    if result.state == FAILED:
        return replace(result, state=KNOWN, lines=(f"known: {known.reason}",))
    return replace(result, state=UNEXPECTED, lines=(f"it passes now; take it out of the ledger: {known.reason}",))


def _mutations(
    check: Check, kept: list[tuple[Call, Outputs, Outputs | None, Outputs]], spec: CallSpec
) -> Iterator[MutationResult]:
    """Each mutation in the calls that the kernel passed, until one shows it; its answer is rounded as the kernel's."""
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


# --- in several processes: the definition works on one core, and a GPU's kernels wait for it


def reports(
    found: Sequence[Target], device: torch.device, jobs: int, *, seed: int, cases: int, **options: Any
) -> Iterator[Report]:
    """Yields reports in the order of the targets. options: of `verify_spec`."""
    if jobs == 1:
        yield from (verify(target, device, seed=seed, cases=cases, **options) for target in found)
        return
    # a spec is a piece of work: some kernels take a minute, and have a spec for each combination of dtypes
    counts = [len(list(_specs(target, seed, cases))) for target in found]
    pieces = [(target.name, number) for target, count in zip(found, counts, strict=True) for number in range(count)]
    work = partial(_piece, device=str(device), seed=seed, cases=cases, **options)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        parts = pool.map(work, *zip(*pieces, strict=True))
        for target, count in zip(found, counts, strict=True):
            yield _whole(target, (Report(target, *part) for part in islice(parts, count)))


def _piece(name: str, number: int, *, device: str, seed: int, cases: int, **options: Any) -> tuple[Any, ...]:
    """The parts of a spec's report without its target, which cannot be sent between processes."""
    load_kernels()
    where = torch.device(device)
    with kernels_for(where), torch.inference_mode(), one_thread():
        target = next(each for each in targets(where, name)[0] if each.name == name)
        report = verify_spec(target, next(islice(_specs(target, seed, cases), number, None)), where, **options)
    return report.calls, report.mutations, report.reasons, report.notes
