"""All self-tests by name, for the doctor and for `npu-gptoss verify`. A server's start takes single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from npu_gptoss.verify.compare import Result
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test import alone, attention, dense, experts
from npu_gptoss.verify.self_test.classic import CLASSIC

SELF_TESTS: dict[str, Callable[[Rank], Iterator[Result]]] = {
    **CLASSIC,
    "attention": attention.results,
    "moe": experts.results,
    "dense": dense.results,
    "narrow-norm": dense.narrow,
    "nz": alone.formats,
    "graph": alone.graph,
}
ALONE = {"nz", "graph"}  # each in a process of its own: formats must not mix in one, and a replay may hang
HARMLESS = {"narrow-norm"}  # a defect there concerns tiny checkpoints only: gpt-oss's norms are 2880 wide


def not_here(name: str, device: torch.device) -> str:
    """Why a self-test cannot run on this device; empty when it can."""
    if name == "nz" and device.type != "npu":
        return "FRACTAL_NZ is a format of Ascend"
    return "a CPU captures no graphs" if name == "graph" and device.type == "cpu" else ""
