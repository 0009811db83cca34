"""Keeps torch's number of threads where n-grams draft (vLLM 0.23 and 0.33)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import NEWER, NGRAMS


@repair("ngram-threads", f"{NGRAMS}:NgramProposer.batch_propose", releases=NEWER, until="vLLM keeps torch's threads")
def install_threads(module: ModuleType) -> None:
    """The first n-gram draft gives torch as many OpenMP threads as the host has cores, whatever OMP_NUM_THREADS says;
    waiting threads spin."""
    proposer = module.NgramProposer
    expect_source(proposer.batch_propose, "batch_propose_numba(", "set_num_threads(1)")

    @around(proposer, "batch_propose")
    def batch_propose(original: Original, self: Any, *given: Any, **options: Any) -> Any:
        import torch

        before = torch.get_num_threads()
        try:
            return original(self, *given, **options)
        finally:
            if torch.get_num_threads() != before:  # numba's first parallel loop sets OpenMP's number for this thread
                torch.set_num_threads(before)
