"""The parts of a check, and the calls that a kernel gets: its registered signatures and traits choose them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.attention.operations import FP8
from npu_gptoss.kernels import ANY, KernelSpec, Operation
from npu_gptoss.kernels.signature import dtype_name
from npu_gptoss.verify.cases import Inputs, widened
from npu_gptoss.verify.compare import Outputs, Verdict, compare
from npu_gptoss.verify.mutations import Definition, Mutation, mutations_of
from npu_gptoss.verify.tolerances import tolerance

OWN = "own"  # precision of an output


@dataclass(frozen=True)
class CallSpec:
    """A dtype for each role, and the trait values that the kernel states.

    thorough: all edge shapes. Mixtures of dtypes, a cache in FP8 among them, get random calls only, because uniform
    dtypes get the edges.
    """

    roles: Mapping[str, str]
    traits: Mapping[str, Any]
    seed: int
    cases: int
    thorough: bool = True

    def __str__(self) -> str:
        return ", ".join(f"{role} {dtype}" for role, dtype in self.roles.items())

    def values(self, trait: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        """The usual values that the kernel takes, in their order; all its own where it takes none of them."""
        allowed = self.traits.get(trait, ANY)
        return tuple(v for v in usual if v in allowed) or tuple(sorted(allowed, key=str))

    def fuzz(self, tag: str) -> Iterator[tuple[str, random.Random]]:
        """The name of each random call, and its generator."""
        for number in range(self.cases):
            yield f"fuzz {number} of seed {self.seed}", random.Random(f"{self.seed} {number} {tag}")

    @property
    def precision(self) -> str:
        """bfloat16 if any role is, else float32."""
        return "bfloat16" if "bfloat16" in self.roles.values() else "float32"


@dataclass(frozen=True)
class Call:
    """One call, its tensors on the CPU."""

    name: str
    inputs: Inputs
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """The check of one operation, or of one function that is no operation, by its name.

    calls: makes the calls of a kernel. run: calls the kernel of that name through the public op, on the device.
    precisions: of each output, by default the call's; OWN: of the dtype in which it came. defined: None is the
    reference kernel in float32. sizes: the base of `Tolerance.of_size`.
    """

    of: Operation | str
    calls: Callable[[CallSpec], Iterator[Call]]
    run: Callable[[Inputs, str | None], Outputs]
    dtypes: Mapping[str, tuple[str, ...]]
    precisions: Mapping[str, str] = field(default_factory=dict)
    defined: Definition | None = None
    sizes: Callable[[Inputs], Outputs] | None = None

    @property
    def name(self) -> str:
        return self.of if isinstance(self.of, str) else self.of.name

    @property
    def operation(self) -> Operation | None:
        return None if isinstance(self.of, str) else self.of

    def definition(self, inputs: Inputs) -> Outputs:
        """The right outputs, computed on the CPU."""
        return self.defined(inputs) if self.defined else self.run(widened(inputs), f"{self.name}.reference")

    @property
    def mutations(self) -> tuple[Mutation, ...]:
        return mutations_of(self.name)

    def wanted(self, inputs: Inputs, precision: str) -> tuple[Outputs, Outputs | None]:
        """The definition's outputs, and their sizes where the tolerance of this precision needs them."""
        return self.definition(inputs), self.sizes(inputs) if self.sizes and precision == "bfloat16" else None

    def judge(self, got: Outputs, want: Outputs, precision: str, sizes: Outputs | None) -> Verdict:
        asked = {name: self.precisions.get(name) or precision for name in want}
        own = {name: dtype_name(got[name].dtype) for name in asked if name in got}
        rounded = {name: dtype for name, dtype in own.items() if dtype == FP8 and asked[name] != "exact"}
        asked |= {name: dtype for name, dtype in own.items() if asked[name] == OWN} | rounded
        limits = {name: tolerance(self.name, name, each) for name, each in asked.items()}
        return compare(got, want, limits, sizes)


def specs_of(kernel: KernelSpec, check: Check, seed: int, cases: int) -> Iterator[CallSpec]:
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
                roles = dict(zip(choices, dtypes, strict=True))
                thorough = len(set(dtypes) & {"float32", "bfloat16"}) <= 1 and roles.get("kv") != FP8
                yield CallSpec(roles, kernel.traits, seed, cases, thorough)


def not_made(kernel: KernelSpec, check: Check) -> Iterable[str]:
    """The dtypes that the kernel takes and for which no call is made, as "role dtype"."""
    made = {(role, dtype) for role, dtypes in check.dtypes.items() for dtype in dtypes}
    stated = {(role, dtype) for accepted in kernel.signatures for role, allowed in accepted.roles for dtype in allowed}
    return sorted(f"{role} {dtype}" for role, dtype in stated - made)
