"""Picks the kernel of a call: the override if there is one, else the runnable kernel of highest priority.

A layer asks once, when it is built (`bind`), for each range of the size in which its calls differ.

Refusals are data: every kernel that falls out does so with reasons in words, which `explain` lists, an impossible
override raises, and an automatic choice logs once.
"""

from __future__ import annotations

import functools
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.envs import KERNEL_OVERRIDE_PREFIX
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.loading import load_plugins
from npu_gptoss.kernels.platform import Platform, current_platform
from npu_gptoss.kernels.profiling import kernel_scope, watched
from npu_gptoss.kernels.registry import KernelSpec, Operation, Priority, Range, registry
from npu_gptoss.kernels.signature import Signature

logger = logging.getLogger(__name__)


class KernelError(InputError):
    """No kernel can run a call, or the one asked for cannot."""

    layout = "\n"


@dataclass(frozen=True)
class Candidate:
    """A kernel and the reasons why it cannot run a call; no reasons: it can."""

    kernel: KernelSpec
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class SelectedKernel:
    """Callable with keyword arguments; its calls appear under its name in a torch profile."""

    kernel: KernelSpec

    @property
    def name(self) -> str:
        return self.kernel.name

    def __call__(self, **arguments: Any) -> Any:
        if not watched():
            return self.kernel.function(**arguments)
        with kernel_scope(self.kernel.name, arguments):
            return self.kernel.function(**arguments)


@dataclass(frozen=True)
class Explanation:
    operation: Operation
    signature: Signature
    traits: tuple[tuple[str, Any], ...]
    platform: Platform
    candidates: tuple[Candidate, ...]
    override: str | None
    selected: KernelSpec | None = field(default=None)

    def lines(self) -> list[str]:
        call = "; ".join(filter(None, (str(self.signature), ", ".join(f"{k}={v}" for k, v in self.traits))))
        lines = [f"{self.operation.name} on {self.platform.kind} for {call}"]
        if self.override:
            lines.append(f"  override: {self.override}")
        for candidate in self.candidates:
            kernel = candidate.kernel
            if kernel is self.selected:
                verdict = "selected"
            elif candidate.reasons:
                verdict = "no: " + "; ".join(candidate.reasons)
            else:
                verdict = "could run"
            lines.append(f"  {kernel.name} (priority {kernel.priority}): {verdict}")
        if not self.candidates:
            lines.append("  no kernel is registered")
        return lines


def reasons_against(
    kernel: KernelSpec, call: Signature, traits: Mapping[str, Any], platform: Platform
) -> tuple[str, ...]:
    """All reasons at once, so that a reader need not fix one to learn the next."""
    reasons = kernel.capability.reasons_against(platform)
    there = [accepted for accepted in kernel.signatures if accepted.needs <= platform.features]
    by_signature = [accepted.reasons_against(call) for accepted in there or kernel.signatures]
    reasons += min(by_signature, key=len)  # those of the nearest combination: none where one fits
    for trait, allowed in kernel.traits.items():
        if trait not in traits:
            reasons.append(f"the call does not say its {trait}")
        elif traits[trait] not in allowed:
            handled = " or ".join(sorted(map(str, allowed))) if isinstance(allowed, frozenset) else str(allowed)
            reasons.append(f"handles {trait} {handled}, got {traits[trait]}")
    return tuple(reasons)


@functools.cache
def override_variable(operation: Operation) -> str:
    """NPU_GPTOSS_KERNEL_<FAMILY>_<MODE>."""
    return f"{KERNEL_OVERRIDE_PREFIX}{operation.family}_{operation.mode}".upper()


def override_for(operation: Operation) -> str | None:
    """The kernel that the user asks for, by name or solution."""
    return os.environ.get(override_variable(operation)) or None


def explain(
    operation: Operation,
    call: Signature,
    traits: Mapping[str, Any],
    *,
    platform: Platform | None = None,
    override: str | None = None,
) -> Explanation:
    """Every kernel of the operation with the reasons against it, and the one that is selected (None: none can run).

    override: a kernel or solution; "" for none, None for the user's (`override_for`).
    """
    load_plugins()
    unknown = sorted(set(traits) ^ set(operation.traits)) + sorted(
        {role for role, _ in call.roles} ^ set(operation.roles)
    )
    if unknown:
        raise KernelError(
            f"a call of {operation.name} has the roles {list(operation.roles)} and traits {list(operation.traits)}; "
            f"missing or not known: {', '.join(unknown)}",
            field=", ".join(unknown),
        )
    platform = platform or current_platform()
    override = override_for(operation) if override is None else override
    candidates = tuple(Candidate(k, reasons_against(k, call, traits, platform)) for k in registry.kernels_of(operation))
    runnable = [c.kernel for c in candidates if not c.reasons]
    if override:
        runnable = [k for k in runnable if k.named(override)]
    selected = runnable[0] if runnable else None
    return Explanation(operation, call, tuple(sorted(traits.items())), platform, candidates, override, selected)


def _refusal(explanation: Explanation) -> KernelError:
    operation, override = explanation.operation, explanation.override
    if not override:
        return KernelError(f"no kernel can run {operation.name}:\n" + "\n".join(explanation.lines()))
    asked = [c for c in explanation.candidates if c.kernel.named(override)]
    if not asked:
        names = ", ".join(f"{c.kernel.name} ({c.kernel.solution})" for c in explanation.candidates)
        return KernelError(f"the override {override!r} of {operation.name} names no kernel; there are {names}")
    reasons = "; ".join(f"{c.kernel.name} " + "; ".join(c.reasons) for c in asked)
    return KernelError(f"the override {override!r} of {operation.name} cannot run: {reasons}")


_cache: dict[tuple[Any, ...], SelectedKernel] = {}
_logged: set[tuple[int, str]] = set()


def select_kernel(
    operation: Operation,
    call: Signature,
    traits: Mapping[str, Any],
    *,
    platform: Platform | None = None,
    override: str | None = None,
) -> SelectedKernel:
    """The kernel for a call; cached. Raises KernelError, with all reasons, when none can run.

    override: as of `explain`.
    """
    load_plugins()
    platform = platform or current_platform()
    override = override_for(operation) if override is None else override
    key = (operation.name, call, tuple(sorted(traits.items())), platform, override, registry.generation)
    found = _cache.get(key)
    if found is None:
        explanation = explain(operation, call, traits, platform=platform, override=override)
        if explanation.selected is None:
            raise _refusal(explanation)
        found = _cache[key] = SelectedKernel(explanation.selected)
        line = f"{operation.name} runs {found.name} for {call}"
        if explanation.selected.priority == Priority.REFERENCE and not override:
            logger.warning("only the slow fp32 reference can run this call\n%s", "\n".join(explanation.lines()))
        elif (registry.generation, line) not in _logged:
            _logged.add((registry.generation, line))
            logger.info("%s", line)
    return found


Described = tuple[Signature, Mapping[str, Any]]
_MOST = 1 << 31


@dataclass(frozen=True)
class Bound:
    """An operation's kernels for the calls of one layer, which differ in one size only.

    ranges: (the largest size, the kernel), ascending; the last has no end.
    """

    ranges: tuple[tuple[int, SelectedKernel], ...]

    def of(self, size: int) -> SelectedKernel:
        for most, kernel in self.ranges:
            if size <= most:
                return kernel
        raise KernelError(f"a size of {size} is beyond {_MOST}")


def _first_size(describe: Callable[[int], Described], trait: str, bound: float, past: bool) -> int:
    """The smallest size whose trait reaches `bound`, or is past it; _MOST where none is."""

    def reached(size: int) -> bool:
        value = describe(size)[1][trait]
        return value > bound or (value == bound and not past)

    return bisect_left(range(_MOST), True, key=reached)


def bind(operation: Operation, describe: Callable[[int], Described], kernel: str | None = None) -> Bound:
    """The kernels for every size, chosen now. Raises KernelError where none can run.

    describe: the call of a given size; a trait that a kernel states as a `Range` must not fall as the size grows.
    kernel: overrides the choice, as the user's variable does: where it can run. If it can run nowhere it raises.
    """
    load_plugins()
    override = override_for(operation) if kernel is None else kernel
    bounds = {
        (trait, bound, past)
        for spec in registry.kernels_of(operation)
        for trait, values in spec.traits.items()
        if isinstance(values, Range)
        for bound, past in ((values.least, False), (values.most, True))
    }
    starts = {0, *(_first_size(describe, *bound) for bound in bounds)}
    ordered = sorted(start for start in starts if start < _MOST)
    calls = [describe(start) for start in ordered]
    able = [bool(override) and explain(operation, *call, override=override).selected is not None for call in calls]
    ranges: list[tuple[int, SelectedKernel]] = []
    for call, can, end in zip(calls, able, [*ordered[1:], _MOST + 1], strict=True):
        run = select_kernel(operation, *call, override=override if can or not any(able) else "")
        if ranges and ranges[-1][1].kernel is run.kernel:
            ranges.pop()
        ranges.append((end - 1, run))
    return Bound(tuple(ranges))


def chosen(
    operation: Operation, kernel: Bound | str | None, size: int, describe: Callable[[int], Described]
) -> SelectedKernel:
    """The kernel of one call of a public operation: of a layer's `Bound`, or selected for this call."""
    if isinstance(kernel, Bound):
        return kernel.of(size)
    return select_kernel(operation, *describe(size), override=kernel)


def selected_kernels() -> tuple[tuple[str, str, str], ...]:
    """(operation, kernel, solution) of each choice of this process since the last registration, sorted.

    A kernel that a caller names is left out, unless the user names it too: self-tests call the slow definition beside
    the kernel that serves.
    """

    def serves(name: str, override: str) -> bool:
        return not override or override == override_for(registry.operations[name])

    chosen = {
        (name, c.kernel.name, c.kernel.solution)
        for (name, *_, override, generation), c in list(_cache.items())
        if generation == registry.generation and serves(name, override)
    }
    return tuple(sorted(chosen))
