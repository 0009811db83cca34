"""Stacks: wheels that fit together, and the CANN emulated below them. Standard library only.

Stacks differ in their fields here and in the `versions` of rules (rules.py); no other code asks for a release.
"""

from __future__ import annotations

from dataclasses import dataclass

# our name -> CANN's own version text
CANN = {"8.3.rc1": "8.3.RC1", "8.3.rc2": "8.3.RC2", "8.5": "8.5.0", "9.0": "9.0.1", "9.1": "9.1.0"}
CANN_VERSIONS = tuple(CANN)


@dataclass(frozen=True)
class Stack:
    """torch_npu: prefix of its releases. cann: the versions emulated below it, the default first."""

    name: str
    torch_npu: str
    cann: tuple[str, ...]
    suffix: str  # of the environment's name


STACKS = (
    Stack("8.3", "2.7.1", ("8.3.rc1", "8.3.rc2", "8.5"), ""),
    Stack("9.1", "2.10.0", ("9.1", "9.0"), "-9.1"),
)
NAMES = tuple(stack.name for stack in STACKS)


def named(name: str) -> Stack:
    return next(stack for stack in STACKS if stack.name == name)


def below(cann: str) -> Stack:
    """The stack that runs on this CANN here."""
    return next(stack for stack in STACKS if cann in stack.cann)
