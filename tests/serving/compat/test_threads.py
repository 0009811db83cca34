"""Drafts by n-grams leave torch its number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from tests.serving.compat.of_release import LINE, OLD

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(OLD, reason="no drafter is supported on vLLM 0.11"),
]

# in a process of its own: numba starts its threads once
K = "[2]" if LINE == "0.33" else "[]"
DRAFT = """
from types import SimpleNamespace as Has
import numpy, torch
from npu_gptoss.serving import compat
compat.apply()
from vllm.v1.spec_decode.ngram_proposer import NgramProposer
drafter = Has(prompt_lookup_min=2, prompt_lookup_max=3, num_speculative_tokens=2)
config = Has(
    speculative_config=drafter,
    model_config=Has(max_model_len=16),
    scheduler_config=Has(max_num_seqs=1024),
    parallel_config=Has(tensor_parallel_size=1),
)
tokens = numpy.array([[1, 2, 3, 4, 1, 2, *[0] * 10]], dtype=numpy.int32)
proposer = NgramProposer(config)
drafts = proposer.batch_propose(1, [0], numpy.array([6], dtype=numpy.int32), tokens, *KKK)
print(drafts, torch.get_num_threads())
"""


@pytest.mark.parametrize("without", ["", "ngram-threads"])
def test_ngrams_give_torch_no_threads_that_it_was_not_given(without: str) -> None:
    variables = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "3", "NPU_GPTOSS_SKIP_PATCHES": without}
    done = subprocess.run(
        [sys.executable, "-c", DRAFT.replace("KKK", K)], env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    drafts, _, threads = done.stdout.splitlines()[-1].rpartition(" ")
    assert drafts == "[[3, 4]]"
    assert (int(threads) > 1) == bool(without)
