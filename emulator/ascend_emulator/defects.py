"""Known defects of CANN that give wrong numbers, computed on demand to show that checks catch them.

Each follows from a published change of CANN's sources, the last three from reports; no source says which binaries have
it. Off by default; `ascend-emulate --defect NAME` switches one on.
"""

from __future__ import annotations

from collections.abc import Iterable

from ascend_emulator.errors import EmulatorError

DEFECTS = {
    "merged-heads": "8.3: attention of one row a request keeps heads 1 to 7 of each group unscaled between tiles of "
    "512 keys (ops-transformer 4251efa76)",
    "sink-per-part": "8.5 and later: the sink of a lone request of more than 2048 keys is counted by each of two parts",
    "hidden-first-tile": "attention with a window: the last rows of a tile of 512 rows keep the sum of a first tile "
    "that is wholly hidden from them",
    "window-race": "attention with a window and sinks: odd heads lose their sink in every second call "
    "(ops-transformer c36036e63, March 2026)",
    "narrow-norm": "npu_add_rms_norm up to 2000 wide: the last row is written before it is computed "
    "(ops-nn cf84e2226, CANN 8.3 and 8.5; only small models are as narrow)",
    "few-rows": "torch's matmul of fewer than 64 rows loses its last 16 columns (ops-nn e3f831f65, betas of CANN 9.1)",
    "stale-counts": "npu_moe_init_routing_v2 for a part of the experts: as many rows get a place as in the call before "
    "(ops-transformer 87b1db69e)",
    "first-replay": "the first replay of a graph with updated calls ends in NaN (vllm-ascend's report 15560, of "
    "unknown cause)",
    "unset-workspace": "attention in a graph reads its workspace before it writes it: wrong at the first replay",
    "late-replays": "a replay begins when the host waits for it: other streams overtake it, unless vllm-ascend "
    "waits before each replay (its PR 14081)",
}


def checked(names: Iterable[str]) -> frozenset[str]:
    """The names as a set. Raises EmulatorError for an unknown name."""
    found = frozenset(names)
    if unknown := sorted(found - DEFECTS.keys()):
        raise EmulatorError(f"the emulated 910B has no defect {', '.join(unknown)}; known: {', '.join(DEFECTS)}")
    return found
