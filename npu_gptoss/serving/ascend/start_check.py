"""Whether this card's attention computes what the definition says: asked once, before the first request.

A second of calls with the rank's own heads (`npu_gptoss.selftest.attention`). A known defect that has a safe way round
is gone round, with one line in the log. Any other wrong result ends the start: text would be wrong without a word.
"""

from __future__ import annotations

import functools
import logging

import torch

from npu_gptoss.attention import ascend
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import select_kernel, signature
from npu_gptoss.selftest.attention import CASES, Case, Outcome, outcomes
from npu_gptoss.selftest.steps import BLOCK, HEAD_DIM

logger = logging.getLogger("vllm.npu_gptoss")

REPEATS = 3


@functools.cache
def attention(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError with each wrong call and its suspect, unless there is a way round, which is then taken."""
    if not _runs_on_cann(dtype):
        return
    wrong = _wrong(tuple(case for case in CASES if case.at_start), heads, kv_heads, dtype, device)
    if wrong and all(outcome.merged_heads for outcome in wrong):
        ascend.keep_heads_apart()
        cases = tuple(dict.fromkeys(outcome.case for outcome in wrong))
        if not (still := _wrong(cases, heads, kv_heads, dtype, device)):
            logger.warning(
                "CANN's attention merges heads wrongly above 512 keys here (%s). Decode calls carry one more "
                "request of two rows, which keeps heads apart: right, and slower. A newer CANN may have it mended.",
                wrong[0].case.suspect,
            )
            return
        wrong = still
    if wrong:
        sentence = (
            "attention computes wrong results on this card, and text would be wrong without a word: "
            + "; ".join(outcome.sentence() for outcome in wrong)
            + ". Install another release of CANN, or set NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops (plain torch "
            "operators, with --enforce-eager), and report it with `npu-gptoss doctor --json`."
        )
        logger.error("%s", sentence)
        raise InputError(sentence)


def _runs_on_cann(dtype: torch.dtype) -> bool:
    """Whether CANN's operator is what serves; another kernel is somebody's choice, and has nothing of its defects."""
    traits = {"head_dim": HEAD_DIM, "block_size": BLOCK, "sliding_window": False}
    kernel = select_kernel(PAGED, signature(query=dtype, kv=dtype, sinks=dtype), traits).kernel
    return kernel.solution in ("ascend", "ascend_fp32")


def _wrong(
    cases: tuple[Case, ...], heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> list[Outcome]:
    found: list[Outcome] = []
    for case in cases:
        groups = 1 if case.one_group else kv_heads
        found += outcomes(case, device, heads=heads // kv_heads * groups, kv_heads=groups, dtype=dtype, repeats=REPEATS)
    return [outcome for outcome in found if outcome.problem]
