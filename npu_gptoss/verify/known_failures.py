"""The ledger of known failures: what fails, where, and why it is left so. An entry that passes is a failure too.

An entry is for a defect that is understood and cannot be mended here, in a driver or in another package. It is taken
out as soon as `verify` says that it passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class KnownFailure:
    """kernel, call: patterns as of a shell. device: cpu, cuda or npu. reason: what is wrong, where it is reported."""

    kernel: str
    call: str
    device: str
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"a known failure needs a reason: {self.kernel}, {self.call}, {self.device}")

    def covers(self, kernel: str, call: str, device: str) -> bool:
        return fnmatchcase(kernel, self.kernel) and fnmatchcase(call, self.call) and device == self.device


KNOWN_FAILURES: tuple[KnownFailure, ...] = ()
