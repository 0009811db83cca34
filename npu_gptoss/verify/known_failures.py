"""The ledger of known failures, with kernel, call, platform and reason. An entry that passes is a failure too.

An entry is for a defect that is understood and not repaired yet. Remove it as soon as `verify` reports that it passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class KnownFailure:
    """kernel, call: patterns as of a shell. platform: ascend, cuda or cpu. reason: the defect and its possible
    repair."""

    kernel: str
    call: str
    platform: str
    reason: str

    def covers(self, kernel: str, call: str, platform: str) -> bool:
        return fnmatchcase(kernel, self.kernel) and fnmatchcase(call, self.call) and platform == self.platform


NO_KEYS = (
    "the operator refuses a row without keys in causal mode (R25); steps on Ascend have their lengths on the host, "
    "where padding rows never reach it"
)
NO_EXPERT = (
    "where all experts are local, ids of -1 reach npu_moe_token_unpermute as addresses (R61): three more launches "
    "a layer would mend it, and under vLLM no row has such ids"
)
KNOWN_FAILURES: tuple[KnownFailure, ...] = (
    KnownFailure("attention.paged.ascend*", "*lengths on the device with padding, all keys", "ascend", NO_KEYS),
    KnownFailure("moe.experts.ascend*", "padding rows of NaN", "ascend", NO_EXPERT),
)
