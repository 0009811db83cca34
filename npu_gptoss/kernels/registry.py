"""Operations with their roles and traits, and the kernels registered for them.

Fail-closed: an operation names every trait of a call that can make a kernel wrong (a sink, a window, a bias), and a
kernel must state for each which values it handles; it cannot register without. Sizes (rows, heads …) are traits, too,
but one that a kernel does not state it takes at any value.
"""

from __future__ import annotations

import functools
import importlib
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


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included; of a kernel's trait."""

    least: float = 0
    most: float = float("inf")

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.least <= value <= self.most

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least}"
        if self.least == 0:
            return f"up to {self.most}"
        return f"{self.least} to {self.most}" if self.most < float("inf") else f"{self.least} and more"


@dataclass(frozen=True)
class Where:
    """The values of a trait for which `holds` is true; `text` describes them."""

    text: str
    holds: Callable[[Any], bool]

    def __contains__(self, value: Any) -> bool:
        return self.holds(value)

    def __str__(self) -> str:
        return self.text


class RegistrationError(TypeError):
    """A kernel that cannot be registered as written: a defect of the package that registers it."""


@dataclass(frozen=True)
class Operation:
    """One operation of the public API: the roles and traits of its calls. sizes: `traits` that a kernel need not
    state."""

    family: str
    mode: str
    roles: tuple[str, ...]
    traits: tuple[str, ...]
    summary: str
    sizes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.family}.{self.mode}"


@dataclass(frozen=True)
class KernelSpec:
    """target: the function, or "package.module:name" of one that is imported at its first call."""

    name: str
    family: str
    mode: str
    solution: str
    target: Callable[..., Any] | str
    capability: Capability
    signatures: tuple[Accepts, ...]
    traits: Mapping[str, Any]
    priority: int
    prepare: Callable[..., Any] | None
    origin: str
    summary: str

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def module(self) -> str:
        """The module that defines the function."""
        return self.target.partition(":")[0] if isinstance(self.target, str) else self.target.__module__

    def named(self, wanted: str) -> bool:
        """True when an override names this kernel: by its name, the last part of it, or its solution."""
        return wanted in (self.name, self.name.removeprefix(f"{self.family}.{self.mode}."), self.solution)


@dataclass
class Registry:
    operations: dict[str, Operation] = field(default_factory=dict)
    kernels: dict[str, KernelSpec] = field(default_factory=dict)
    generation: int = 0  # changes with every registration, so that cached selections are not served stale
    lock: threading.RLock = field(default_factory=threading.RLock)

    def kernels_of(self, operation: Operation) -> list[KernelSpec]:
        """Highest priority first; equal priorities by name, so that the choice does not depend on import order."""
        found = [k for k in self.kernels.values() if (k.family, k.mode) == (operation.family, operation.mode)]
        return sorted(found, key=lambda k: (-k.priority, k.name))

    def add(self, spec: KernelSpec) -> None:
        with self.lock:
            existing = self.kernels.get(spec.name)
            if existing is not None:
                raise RegistrationError(
                    f"the kernel name {spec.name!r} is taken by {existing.origin} ({existing.module}); "
                    f"{spec.origin} must register under another name"
                )
            self.kernels[spec.name] = spec
            self.generation += 1

    def remove_origin(self, origin: str) -> None:
        """Removes a package's kernels, when its loading failed half-way."""
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
    family: str,
    mode: str,
    *,
    roles: tuple[str, ...],
    traits: tuple[str, ...] = (),
    sizes: tuple[str, ...] = (),
    summary: str,
) -> Operation:
    operation = Operation(family, mode, roles, (*traits, *sizes), summary, sizes)
    if operation.name in registry.operations:
        raise RegistrationError(f"the operation {operation.name} is already defined")
    registry.operations[operation.name] = operation
    return operation


def register_kernel(
    operation: Operation,
    *,
    solution: str,
    signatures: tuple[Accepts, ...],
    priority: int,
    traits: Mapping[str, Any] | None = None,
    capability: Capability = ANYWHERE,
    name: str | None = None,
    prepare: Callable[..., Any] | None = None,
    function: str | None = None,
    summary: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers a function as a kernel of an operation, and returns it unchanged.

    solution: its origin (ascend, triton, small_ops, reference, or the plugin's name).
    signatures: the dtype combinations it takes; one fitting is enough. Each names all roles of the operation.
    traits: for every trait of the operation the values handled: a frozenset, `Range`, `Where` or ANY. Sizes need not be
        stated.
    priority: see `Priority`; the band 16-19 belongs to plugins.
    name: unique; default "<family>.<mode>.<solution>".
    prepare: called once at load with the public weights; its result is passed to every call of the kernel.
    function: "package.module:name", imported at the first call; then nothing is decorated, and `summary` replaces
        the first paragraph of the docstring.
    """
    full_name = name or f"{operation.name}.{solution}"
    origin = _origin.get()

    def refuse(why: str) -> RegistrationError:
        return RegistrationError(f"the kernel {full_name!r} of {origin} cannot be registered: {why}")

    if registry.operations.get(operation.name) != operation:
        raise refuse(f"there is no operation {operation.name}; there are {', '.join(sorted(registry.operations))}")
    if not Priority.REFERENCE <= priority <= Priority.HIGHEST:
        raise refuse(f"priority {priority} is not within {Priority.REFERENCE}..{Priority.HIGHEST}")
    if priority >= Priority.PLUGIN and origin == BUILT_IN:
        raise refuse(f"priority {priority} is in the band {Priority.PLUGIN}..{Priority.HIGHEST} reserved for plugins")
    stated = {**dict.fromkeys(operation.sizes, ANY), **(traits or {})}
    if set(stated) != set(operation.traits):
        raise refuse(f"traits must be stated for {sorted(operation.traits)}, got {sorted(stated)}")
    for trait, values in stated.items():
        if values is not ANY and not isinstance(values, (frozenset, Range, Where)):
            raise refuse(f"trait {trait} must be a frozenset of values, Range, Where or ANY, got {values!r}")
    if not signatures:
        raise refuse("it takes no signature")
    for accepted in signatures:
        if {role for role, _ in accepted.roles} != set(operation.roles):
            raise refuse(f"each signature must name the roles {sorted(operation.roles)}")
    if function is not None and not summary:
        raise refuse("a function given by its name needs a summary")

    def decorate(target: Callable[..., Any] | str) -> Any:
        said = summary or " ".join((target.__doc__ or "").strip().split("\n\n")[0].split())
        name = (full_name, operation.family, operation.mode, solution)
        takes = (capability, tuple(signatures), stated, priority)
        registry.add(KernelSpec(*name, target, *takes, prepare, origin, said))
        return target

    if function is not None:
        decorate(function)
    return decorate
