"""What there is: operations with their roles and traits, and the kernels registered for them.

Fail-closed: an operation names every trait of a call that can make a kernel wrong (a sink, a window, a bias), and a
kernel must state for each which values it handles; it cannot register without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.kernels.platform import ANYWHERE, Capability
from npu_gptoss.kernels.signature import Accepts

BUILT_IN = "npu_gptoss"


class Priority:
    """Bands of priority; the highest that can run is selected. Pick the lowest band that fits.

    | band        | values | for                                                              |
    |-------------|--------|------------------------------------------------------------------|
    | REFERENCE   | 0      | the definition, in fp32; never selected while another can run     |
    | PORTABLE    | 4-7    | plain torch ops, any device                                       |
    | PERFORMANT  | 8-11   | written or tuned for one kind of device                           |
    | SPECIALISED | 12-15  | best for some shapes only, and says which                         |
    | PLUGIN      | 16-19  | reserved for kernels registered by other packages                 |
    """

    REFERENCE = 0
    PORTABLE = 4
    PERFORMANT = 8
    SPECIALISED = 12
    PLUGIN = 16
    HIGHEST = 19


class _Any:
    def __contains__(self, value: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "any"


ANY = _Any()


class RegistrationError(TypeError):
    """A kernel that cannot be registered as written: a defect of the package that registers it."""


@dataclass(frozen=True)
class Operation:
    """One operation of the public API: what its calls pass. `parameters` are the names every kernel is called with."""

    family: str
    mode: str
    roles: tuple[str, ...]
    traits: tuple[str, ...]
    summary: str

    @property
    def name(self) -> str:
        return f"{self.family}.{self.mode}"


@dataclass(frozen=True)
class KernelSpec:
    name: str
    family: str
    mode: str
    solution: str
    function: Callable[..., Any]
    capability: Capability
    signatures: tuple[Accepts, ...]
    traits: Mapping[str, Any]
    priority: int
    prepare: Callable[..., Any] | None
    origin: str

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.function.__doc__ or "").strip().split("\n\n")[0].split())


@dataclass
class Registry:
    operations: dict[str, Operation] = field(default_factory=dict)
    kernels: dict[str, KernelSpec] = field(default_factory=dict)
    generation: int = 0  # changes with every registration, so that cached selections are not served stale
    lock: threading.RLock = field(default_factory=threading.RLock)

    def operation(self, family: str, mode: str) -> Operation:
        try:
            return self.operations[f"{family}.{mode}"]
        except KeyError:
            known = ", ".join(sorted(self.operations)) or "none"
            raise RegistrationError(f"there is no operation {family}.{mode}; defined are: {known}") from None

    def kernels_of(self, operation: Operation) -> list[KernelSpec]:
        """Highest priority first; equal priorities by name, so that the choice does not depend on import order."""
        found = [k for k in self.kernels.values() if (k.family, k.mode) == (operation.family, operation.mode)]
        return sorted(found, key=lambda k: (-k.priority, k.name))

    def add(self, spec: KernelSpec) -> None:
        with self.lock:
            existing = self.kernels.get(spec.name)
            if existing is not None:
                raise RegistrationError(
                    f"the kernel name {spec.name!r} is taken by {existing.origin} ({existing.function.__module__}); "
                    f"{spec.origin} must register under another name"
                )
            self.kernels[spec.name] = spec
            self.generation += 1

    def remove_origin(self, origin: str) -> None:
        """Takes back what a package registered, when its loading failed half-way."""
        with self.lock:
            self.kernels = {name: k for name, k in self.kernels.items() if k.origin != origin}
            self.generation += 1


registry = Registry()
_origin: ContextVar[str] = ContextVar("kernel_origin", default=BUILT_IN)


@contextmanager
def registering_as(origin: str) -> Iterator[None]:
    """Kernels registered inside belong to `origin`, the distribution of a plugin."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def define_operation(
    family: str, mode: str, *, roles: tuple[str, ...], traits: tuple[str, ...], summary: str
) -> Operation:
    operation = Operation(family, mode, roles, traits, summary)
    if operation.name in registry.operations:
        raise RegistrationError(f"the operation {operation.name} is already defined")
    registry.operations[operation.name] = operation
    return operation


def register_kernel(
    family: str,
    mode: str,
    *,
    solution: str,
    signatures: tuple[Accepts, ...],
    traits: Mapping[str, Any],
    priority: int,
    capability: Capability = ANYWHERE,
    name: str | None = None,
    prepare: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers a function as a kernel of an operation, and returns it unchanged.

    solution: where it comes from (ascend, triton, small_ops, reference, or the plugin's name).
    signatures: the dtype combinations it takes; one fitting is enough. Each names all roles of the operation.
    traits: for every trait of the operation the frozenset of values handled, or ANY.
    priority: see `Priority`; the band 16-19 belongs to plugins.
    name: unique; default "<family>.<mode>.<solution>".
    prepare: called once at load with the public weights; its result is passed to every call of the kernel.
    """
    operation = registry.operation(family, mode)
    full_name = name or f"{operation.name}.{solution}"
    origin = _origin.get()

    def refuse(why: str) -> RegistrationError:
        return RegistrationError(f"the kernel {full_name!r} of {origin} cannot be registered: {why}")

    if not Priority.REFERENCE <= priority <= Priority.HIGHEST:
        raise refuse(f"priority {priority} is not within {Priority.REFERENCE}..{Priority.HIGHEST}")
    if priority >= Priority.PLUGIN and origin == BUILT_IN:
        raise refuse(f"priority {priority} is in the band {Priority.PLUGIN}..{Priority.HIGHEST} reserved for plugins")
    if set(traits) != set(operation.traits):
        raise refuse(f"traits must be stated for {sorted(operation.traits)}, got {sorted(traits)}")
    for trait, values in traits.items():
        if values is not ANY and not isinstance(values, frozenset):
            raise refuse(f"trait {trait} must be a frozenset of values or ANY, got {values!r}")
    if not signatures:
        raise refuse("it takes no signature")
    for accepted in signatures:
        if {role for role, _ in accepted.roles} != set(operation.roles):
            raise refuse(f"each signature must name the roles {sorted(operation.roles)}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        registry.add(
            KernelSpec(
                full_name,
                family,
                mode,
                solution,
                function,
                capability,
                tuple(signatures),
                dict(traits),
                priority,
                prepare,
                origin,
            )
        )
        return function

    return decorate
