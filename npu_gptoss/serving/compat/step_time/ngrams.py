"""Keeps torch's number of threads where n-grams draft, and compiles their search at the start (vLLM 0.23 and 0.33)."""

from __future__ import annotations

import inspect
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


@repair(
    "ngram-warm-up", f"{NGRAMS}:NgramProposer.__init__", releases=NEWER, until="vLLM's own warm-up drafts something"
)
def install_warm_up(module: ModuleType) -> None:
    """vLLM's warm-up drafts for no request, so the first n-gram draft compiles, and all streams wait for seconds."""
    proposer = module.NgramProposer
    expect_source(proposer.__init__, "[[]] * 1024")
    drafts_each = "k" in inspect.signature(proposer.batch_propose).parameters  # of 0.33

    @around(proposer, "__init__")
    def __init__(original: Original, self: Any, *given: Any, **options: Any) -> None:
        import numpy as np

        original(self, *given, **options)
        tokens = np.zeros((1, self.max_model_len), dtype=np.int32)  # arrays of the runner's types
        self.batch_propose(1, [0], np.zeros(1, dtype=np.int32), tokens, *([self.k] if drafts_each else []))
