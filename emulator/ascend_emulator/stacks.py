"""The stacks: wheels that fit together, and the CANN that is emulated below them. One table; standard library only.

What differs between stacks is a field here, or a rule's `versions` (rules.py); no other code asks for a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# name here -> what CANN says of itself
CANN = {"8.3.rc1": "8.3.RC1", "8.3.rc2": "8.3.RC2", "8.5": "8.5.0", "9.0": "9.0.1", "9.1": "9.1.0"}
CANN_VERSIONS = tuple(CANN)


@dataclass(frozen=True)
class Stack:
    """torch_npu: its releases start so. cann: the versions emulated below it, the default first."""

    name: str
    torch_npu: str
    cann: tuple[str, ...]
    suffix: str  # of the name of its environment
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


STACKS = (
    Stack("8.3", "2.7.1", ("8.3.rc1", "8.3.rc2", "8.5"), ""),
    # vllm-ascend takes a vLLM that calls itself 0.23.0+empty, as one from the source release does, for a later one
    Stack("9.1", "2.10.0", ("9.1", "9.0"), "-9.1", MappingProxyType({"VLLM_VERSION": "0.23.0"})),
)
NAMES = tuple(stack.name for stack in STACKS)


def named(name: str) -> Stack:
    return next(stack for stack in STACKS if stack.name == name)


def below(cann: str) -> Stack:
    """The stack that is run on this CANN here."""
    return next(stack for stack in STACKS if cann in stack.cann)
