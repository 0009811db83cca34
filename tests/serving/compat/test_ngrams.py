"""Drafts by n-grams leave torch its number of threads, and are compiled before the first request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.serving.compat.of_release import LINE, OLD

pytestmark = pytest.mark.skipif(OLD, reason="no drafter is supported on vLLM 0.11")

# in a process of its own: numba starts its threads once
K = "[2]" if LINE == "0.33" else "[]"
DRAFT = """
from types import SimpleNamespace as Has
import torch
from npu_gptoss.serving import compat
compat.apply()
from vllm.v1.spec_decode import ngram_proposer
drafter = Has(prompt_lookup_min=2, prompt_lookup_max=3, num_speculative_tokens=2)
config = Has(
    speculative_config=drafter,
    model_config=Has(max_model_len=16),
    scheduler_config=Has(max_num_seqs=1024),
    parallel_config=Has(tensor_parallel_size=1),
)
tokens = torch.tensor([[1, 2, 3, 4, 1, 2, *[0] * 10]], dtype=torch.int32).numpy()  # as vLLM's batch has them
lengths = torch.tensor([6], dtype=torch.int32).numpy()
proposer = ngram_proposer.NgramProposer(config)
search = ngram_proposer.batch_propose_numba
compiled = len(search.signatures)
drafts = proposer.batch_propose(1, [0], lengths, tokens, *KKK)
print(drafts == [[3, 4]], torch.get_num_threads() > 1, len(search.signatures) - compiled)
"""


@pytest.mark.parametrize(
    "without", ["", pytest.param("ngram-threads,ngram-warm-up", marks=pytest.mark.long)], ids=["repaired", "stock"]
)
def test_ngrams_give_torch_no_threads_and_compile_in_no_step(without: str) -> None:
    variables = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "3", "NPU_GPTOSS_SKIP_PATCHES": without}
    done = subprocess.run(
        [sys.executable, "-c", DRAFT.replace("KKK", K)], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    right, more_threads, compiled = done.stdout.split()[-3:]
    assert (right, more_threads, compiled) == ("True", *(("True", "1") if without else ("False", "0")))
