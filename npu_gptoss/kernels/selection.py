"""Picks the kernel of a call: the override if there is one, else the highest priority among those that can run.

Refusals are data: every kernel that falls out does so with reasons in words, which `explain` lists, an impossible
override raises, and an automatic choice logs once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.envs import KERNEL_OVERRIDE_PREFIX
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.loading import load_plugins
from npu_gptoss.kernels.platform import Platform, current_platform
from npu_gptoss.kernels.profiling import kernel_scope
from npu_gptoss.kernels.registry import KernelSpec, Operation, Priority, registry
from npu_gptoss.kernels.signature import Signature

logger = logging.getLogger(__name__)


class KernelError(InputError):
    """No kernel can run a call, or the one asked for cannot."""


@dataclass(frozen=True)
class Candidate:
    """A kernel and why it cannot run a call; no reasons: it can."""

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
    by_signature = [accepted.reasons_against(call) for accepted in kernel.signatures]
    reasons += min(by_signature, key=len)  # those of the nearest combination: none where one fits
    for trait, allowed in kernel.traits.items():
        if trait not in traits:
            reasons.append(f"the call does not say its {trait}")
        elif traits[trait] not in allowed:
            handled = " or ".join(sorted(map(str, allowed)))
            reasons.append(f"handles {trait} {handled}, got {traits[trait]}")
    return tuple(reasons)


_overrides: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("kernel_overrides", default=())


@contextmanager
def kernel_override(**operations: str) -> Iterator[None]:
    """kernel_override(attention_paged="reference"): names a kernel or solution for an operation, inside the block."""
    known = {f"{o.family}_{o.mode}" for o in registry.operations.values()}
    for key in operations:
        if key not in known:
            raise KernelError(f"there is no operation {key!r} to override; there are {', '.join(sorted(known))}")
    token = _overrides.set((*_overrides.get(), *operations.items()))
    try:
        yield
    finally:
        _overrides.reset(token)


def override_for(operation: Operation) -> str | None:
    """From the innermost context manager, else from NPU_GPTOSS_KERNEL_<FAMILY>_<MODE>."""
    key = f"{operation.family}_{operation.mode}"
    for name, wanted in reversed(_overrides.get()):
        if name == key:
            return wanted
    return os.environ.get(KERNEL_OVERRIDE_PREFIX + key.upper()) or None


def explain(
    operation: Operation,
    call: Signature,
    traits: Mapping[str, Any],
    *,
    platform: Platform | None = None,
    override: str | None = None,
) -> Explanation:
    """Every kernel of the operation with the reasons against it, and the one that is selected (None: none can run)."""
    load_plugins()
    unknown = sorted(set(traits) ^ set(operation.traits)) + sorted(
        {role for role, _ in call.roles} ^ set(operation.roles)
    )
    if unknown:
        raise KernelError(
            f"a call of {operation.name} has the roles {list(operation.roles)} and traits {list(operation.traits)}; "
            f"missing or not known: {', '.join(unknown)}"
        )
    platform = platform or current_platform()
    override = override or override_for(operation)
    candidates = tuple(Candidate(k, reasons_against(k, call, traits, platform)) for k in registry.kernels_of(operation))
    runnable = [c.kernel for c in candidates if not c.reasons]
    if override:
        runnable = [k for k in runnable if override in (k.name, k.solution)]
    selected = runnable[0] if runnable else None
    return Explanation(operation, call, tuple(sorted(traits.items())), platform, candidates, override, selected)


def _refusal(explanation: Explanation) -> KernelError:
    operation, override = explanation.operation, explanation.override
    if not override:
        return KernelError(f"no kernel can run {operation.name}:\n" + "\n".join(explanation.lines()))
    asked = [c for c in explanation.candidates if override in (c.kernel.name, c.kernel.solution)]
    if not asked:
        names = ", ".join(f"{c.kernel.name} ({c.kernel.solution})" for c in explanation.candidates)
        return KernelError(f"the override {override!r} of {operation.name} names no kernel; there are {names}")
    reasons = "; ".join(f"{c.kernel.name} " + "; ".join(c.reasons) for c in asked)
    return KernelError(f"the override {override!r} of {operation.name} cannot run: {reasons}")


_cache: dict[tuple[Any, ...], SelectedKernel] = {}


def select_kernel(
    operation: Operation,
    call: Signature,
    traits: Mapping[str, Any],
    *,
    platform: Platform | None = None,
    override: str | None = None,
) -> SelectedKernel:
    """The kernel for a call; cached. Raises KernelError, with all reasons, when none can run."""
    load_plugins()
    platform = platform or current_platform()
    override = override or override_for(operation)
    key = (operation.name, call, tuple(sorted(traits.items())), platform, override, registry.generation)
    found = _cache.get(key)
    if found is None:
        explanation = explain(operation, call, traits, platform=platform, override=override)
        if explanation.selected is None:
            raise _refusal(explanation)
        if explanation.selected.priority == Priority.REFERENCE and not override:
            logger.warning("only the slow fp32 reference can run this call\n%s", "\n".join(explanation.lines()))
        else:
            logger.info("%s runs %s for %s", operation.name, explanation.selected.name, call)
        found = _cache[key] = SelectedKernel(explanation.selected)
    return found


def selected_kernels() -> tuple[tuple[str, str, str], ...]:
    """(operation, kernel, solution) of each choice of this process since the last registration, sorted."""
    chosen = {(k[0], c.kernel.name, c.kernel.solution) for k, c in list(_cache.items()) if k[-1] == registry.generation}
    return tuple(sorted(chosen))
