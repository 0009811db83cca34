"""What a check consists of, and how the registry's metadata choose the calls that a kernel gets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_gptoss.kernels import ANY, KernelSpec, Operation
from npu_gptoss.verify.compare import Verdict, compare
from npu_gptoss.verify.tolerances import tolerance

Inputs = Mapping[str, Any]
Outputs = Mapping[str, torch.Tensor]
Definition = Callable[[Inputs], Outputs]


@dataclass(frozen=True)
class Wanted:
    """What one kernel is called with: a dtype for each role, and the trait values that it states.

    thorough: all edge shapes; else only the fuzz, for mixtures of dtypes whose uniform ones get the edges.
    """

    roles: Mapping[str, str]
    traits: Mapping[str, Any]
    seed: int
    cases: int
    thorough: bool = True

    def __str__(self) -> str:
        return ", ".join(f"{role} {dtype}" for role, dtype in self.roles.items())

    def values(self, trait: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of those that the kernel takes the usual ones, in their order; where it takes none of them, all its own."""
        allowed = self.traits.get(trait, ANY)
        return tuple(v for v in usual if v in allowed) or tuple(sorted(allowed, key=str))

    @property
    def precision(self) -> str:
        """Of the coarsest role: bfloat16 as soon as one tensor of the activations is."""
        return "bfloat16" if "bfloat16" in self.roles.values() else "float32"


@dataclass(frozen=True)
class Call:
    """One call, its tensors on the CPU."""

    name: str
    inputs: Inputs
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mistake:
    """A known mistake: what a kernel that makes it would answer, or None where the call cannot show it."""

    name: str
    answer: Callable[[Inputs, Definition], Outputs | None]


@dataclass(frozen=True)
class Check:
    """One operation of the registry, or one function of ours that is none (`operation` None).

    calls: for a kernel. run: on the device, by the kernel of that name, through the public op. definition: on the CPU.
    precisions: of each output; "" stands for that of the call, see `Wanted`.
    sizes: what `Tolerance.of_size` is a share of.
    """

    name: str
    summary: str
    calls: Callable[[Wanted], Iterator[Call]]
    run: Callable[[Inputs, str], Outputs]
    definition: Definition
    mistakes: tuple[Mistake, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    precisions: Mapping[str, str] = field(default_factory=dict)
    sizes: Callable[[Inputs], Outputs] | None = None
    operation: Operation | None = None

    def judge(self, got: Outputs, want: Outputs, precision: str, sizes: Outputs | None) -> Verdict:
        limits = {name: tolerance(self.name, name, self.precisions.get(name) or precision) for name in want}
        return compare(got, want, limits, sizes)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Every tensor inside, dataclasses included, changed; plans that a kernel cached in metadata are forgotten."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{n: {} if isinstance(v, dict) else mapped(v, change) for n, v in fields.items()}
        )
    if isinstance(value, Mapping):
        return {name: mapped(v, change) for name, v in value.items()}
    return value


def widened(inputs: Inputs) -> Inputs:
    """bfloat16 tensors as float32: what the definition computes from."""
    return mapped(inputs, lambda t: t.float() if t.dtype == torch.bfloat16 else t.clone())


def on(inputs: Inputs, device: torch.device) -> Inputs:
    """A copy on the device; what a kernel writes in place does not reach the call."""
    return mapped(inputs, lambda t: t.clone() if device.type == "cpu" else t.to(device))


def with_inputs(name: str, **changes: Callable[[Inputs], Any]) -> Mistake:
    """The definition of changed inputs. A change that returns None says that the call cannot show it."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs | None:
        changed = {key: change(inputs) for key, change in changes.items()}
        return None if any(v is None for v in changed.values()) else definition({**inputs, **changed})

    return Mistake(name, answer)


def wanted_of(kernel: KernelSpec, check: Check, seed: int, cases: int) -> Iterator[Wanted]:
    """Every combination of dtypes that the kernel's signatures name and the check can make, each once."""
    seen = set()
    for accepted in kernel.signatures:
        choices = {
            role: [d for d in check.dtypes[role] if d in allowed] if role in check.dtypes else []
            for role, allowed in accepted.roles
        }
        for dtypes in itertools.product(*choices.values()):
            if dtypes not in seen:
                seen.add(dtypes)
                floats = set(dtypes) & {"float32", "bfloat16"}
                yield Wanted(dict(zip(choices, dtypes, strict=True)), kernel.traits, seed, cases, len(floats) <= 1)


def not_made(kernel: KernelSpec, check: Check) -> Iterable[str]:
    """The dtypes that the kernel takes and no call can be made in, as "role dtype"."""
    made = {(role, dtype) for role, dtypes in check.dtypes.items() for dtype in dtypes}
    stated = {(role, dtype) for accepted in kernel.signatures for role, allowed in accepted.roles for dtype in allowed}
    return sorted(f"{role} {dtype}" for role, dtype in stated - made)
