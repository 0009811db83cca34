"""Whether this card computes what the definition says: asked once, before the first request.

A second of calls with the rank's own sizes (`npu_gptoss.selftest`). A known defect that has a safe way round is gone
round, with one line in the log. Any other wrong result ends the start: text would be wrong without a word.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from npu_gptoss.attention import ascend, paged_call
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import SelectedKernel, select_kernel
from npu_gptoss.moe.operations import EXPERTS, FEW_ROWS, ROUTE, experts_call, route_call
from npu_gptoss.selftest import dense, experts
from npu_gptoss.selftest.attention import BLOCK, CASES, HEAD_DIM, outcomes
from npu_gptoss.selftest.experts import Sizes
from npu_gptoss.selftest.outcome import Outcome
from npu_gptoss.selftest.record import Record, stack
from npu_gptoss.serving.lines.vllm import expert_share

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

logger = logging.getLogger("vllm.npu_gptoss")

REPEATS = 3


@functools.cache
def attention(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError with each wrong call and its suspect, unless there is a way round, which is then taken."""
    query = torch.empty(1, heads, HEAD_DIM, device="meta", dtype=dtype)
    cache = torch.empty(1, BLOCK, kv_heads, HEAD_DIM, device="meta", dtype=dtype)
    if not _is_of_cann(select_kernel(PAGED, *paged_call(1, query, cache, query, None))):
        return
    wrong = _wrong(heads, kv_heads, dtype, device)
    if wrong and all(outcome.merged_heads for outcome in wrong):
        ascend.keep_heads_apart()
        if not (still := _wrong(heads, kv_heads, dtype, device)):
            logger.warning(
                "CANN's attention merges heads wrongly above 512 keys here (%s). Decode calls carry one more "
                "request of two rows, which keeps heads apart: right, and slower. A newer CANN may have it mended.",
                wrong[0].suspect,
            )
            Record.of().remember(stack(), way_round="decode calls carry one more request of two rows (merged heads)")
            return
        wrong = still
    _refuse("attention computes", [outcome.sentence() for outcome in wrong], PAGED.name)


def _wrong(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> list[Outcome]:
    found: list[Outcome] = []
    for case in (case for case in CASES if case.at_start):
        groups = 1 if case.one_group else kv_heads
        found += outcomes(case, device, heads=heads // kv_heads * groups, kv_heads=groups, dtype=dtype, repeats=REPEATS)
    return [outcome for outcome in found if outcome.problem]


def rest(config: VllmConfig, device: torch.device) -> None:
    """Everything but attention, in the sizes of this rank, before its weights take the memory. Raises InputError."""
    model, parallel = config.model_config, config.parallel_config
    heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    with torch.inference_mode():  # as a server calls them
        routed(_share(config), model.dtype, device)
        around(_share(config), heads, kv_heads, model.dtype, device)
    torch.npu.empty_cache()
    if device.index in (None, 0):
        tell_what_was_seen()


def _share(config: VllmConfig) -> Sizes:
    """This rank's part of each layer's experts, as vLLM will cut them."""
    hf = config.model_config.hf_config
    parts, experts_here = expert_share(config)
    return Sizes(hf.hidden_size, hf.intermediate_size // parts, hf.num_local_experts, experts_here)


@functools.cache
def routed(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError for wrong routing or experts, where CANN's operators are what serves."""
    if _is_of_cann(select_kernel(ROUTE, *route_call(dtype))):
        shapes = [(tokens, sizes.experts) for tokens in (1, 257)]
        wrong = [found.sentence() for found in experts.gates(shapes, device, dtype) if found.problem]
        _refuse("routing computes", wrong, ROUTE.name)
    call = experts_call(
        FEW_ROWS + 1,
        dtype=dtype,
        weight=dtype,
        num_experts=sizes.experts,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        expert_parallel=sizes.is_part,
    )
    if _is_of_cann(select_kernel(EXPERTS, *call)):
        cases = [case for case in experts.CASES if case.at_start and (sizes.is_part or not case.of_part)]
        found = experts.outcomes(cases, sizes, device, dtype, REPEATS)
        _refuse("experts compute", [outcome.sentence() for outcome in found if outcome.problem], EXPERTS.name)


@functools.cache
def around(sizes: Sizes, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError for wrong projections or norms; there is no other kernel for them."""
    shapes = dense.shapes(sizes.hidden, heads, kv_heads, HEAD_DIM, sizes.experts)
    found = [
        *dense.projections([case for case in dense.CASES if case.at_start], shapes, device, dtype, REPEATS),
        *dense.norms(dense.NORM_ROWS[True], sizes.hidden, device, dtype, REPEATS),
    ]
    _refuse("projections or norms compute", [outcome.sentence() for outcome in found if outcome.problem])


def tell_what_was_seen() -> None:
    """One line where the doctor never looked at this CANN, or saw it compute wrongly."""
    here = stack()
    seen = Record.of().read().get(here)
    if seen is None or not seen.tests:
        logger.warning(
            "%s was never tested whole here, and what another release computes rightly says nothing of it: "
            "`npu-gptoss doctor` does it in a minute. The start itself makes the short tests only.",
            here,
        )
    elif seen.wrong:
        logger.warning("%s: the doctor found wrong results on %s: %s.", here, seen.when, ", ".join(seen.wrong))


def _is_of_cann(selected: SelectedKernel) -> bool:
    """Whether CANN's operator is what serves; another kernel is somebody's choice, and has nothing of its defects."""
    return selected.kernel.solution == "ascend"


def _refuse(who: str, wrong: Sequence[str], operation: str = "") -> None:
    """Raises InputError if anything is wrong. operation: whose plain torch kernel is a way out."""
    if not wrong:
        return
    variable = f"NPU_GPTOSS_KERNEL_{operation.replace('.', '_').upper()}"
    way_out = f", or set {variable}=small_ops (plain torch operators, with --enforce-eager)" if operation else ""
    sentence = (
        f"{who} wrong results on this card, and text would be wrong without a word: {'; '.join(wrong)}. Install "
        f"another release of CANN{way_out}, and report it with `npu-gptoss doctor --json`."
    )
    logger.error("%s", sentence)
    raise InputError(sentence)
