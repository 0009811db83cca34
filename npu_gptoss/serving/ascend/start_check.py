"""Checks the card before the first request: attention, routing, experts, projections and norms.

Runs the short self-tests (`npu_gptoss.verify.self_test`) with this rank's sizes; they take a second. A known defect
with a safe workaround gets the workaround and a log entry. Any other wrong result ends the start, because text would be
wrong without an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from npu_gptoss.attention import ascend, paged_call
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.dense.operations import ROTATE_WRITE
from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.kernels import SelectedKernel, select_kernel
from npu_gptoss.model import device_memory
from npu_gptoss.moe.operations import EXPERTS, FEW_ROWS, ROUTE, experts_call, route_call
from npu_gptoss.nominal import kind_of
from npu_gptoss.serving import logger
from npu_gptoss.serving.releases.ascend import mc2_rows
from npu_gptoss.serving.releases.vllm import expert_share
from npu_gptoss.verify.compare import Result
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test import attention as attention_calls
from npu_gptoss.verify.self_test import dense, experts, record
from npu_gptoss.verify.self_test.attention import BLOCK, HEAD_DIM

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

REPEATS = 3


@functools.cache
def attention(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError with each wrong call and its suspect, unless a workaround exists, which is then enabled."""
    query = torch.empty(1, heads, HEAD_DIM, device="meta", dtype=dtype)
    cache = torch.empty(1, BLOCK, kv_heads, HEAD_DIM, device="meta", dtype=dtype)
    if not _is_of_cann(select_kernel(PAGED, *paged_call(1, query, cache, query, None))):
        return
    rank = Rank(device, dtype, REPEATS, heads=heads, kv_heads=kv_heads, short=True)
    wrong = _wrong(attention_calls.results(rank))
    if wrong and all(result.merged_heads for result in wrong):
        ascend.keep_heads_apart()
        if not (still := _wrong(attention_calls.results(rank))):
            logger.warning(
                "CANN's attention merges heads wrongly above 512 keys here (%s). Decode calls carry one more "
                "request of two rows, which keeps heads apart: correct but slower. A newer CANN may have it repaired.",
                wrong[0].suspect,
            )
            return
        wrong = still
    _refuse("attention computes", wrong, PAGED.name)


@functools.cache
def rotation(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InputError for wrong RoPE or a wrong cache write by our kernel, which the card's compiler has built."""
    rank = Rank(device, dtype, REPEATS, heads=heads, kv_heads=kv_heads, short=True)
    _refuse("RoPE and the cache write compute", _wrong(dense.rotation(rank)), ROTATE_WRITE.name)


def _wrong(found: Iterable[Result]) -> list[Result]:
    return [result for result in found if result.wrong]


def rest(config: VllmConfig, device: torch.device) -> None:
    """Checks everything except attention, in this rank's sizes, before weights take the memory. Raises InputError."""
    dispatch(config, device)
    with torch.inference_mode():  # as in a server
        routed(_rank(config, device))
        around(_rank(config, device))
    torch.npu.empty_cache()
    if device.index in (None, 0):
        tell_what_was_seen(device)


def name_of(device: torch.device) -> str:
    return torch.npu.get_device_name(device)


def dispatch(config: VllmConfig, device: torch.device) -> None:
    """Raises InputError where an A3 cannot send rows to experts: CANN would end the profile run with 561002."""
    parallel, model = config.parallel_config, config.model_config.hf_config
    if not parallel.enable_expert_parallel or kind_of(name_of(device)) != "A3":
        return
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if ranks < 2:
        why = "an A3 sends rows to experts between 2 and 768 dies"
        raise InputError(Refusal("--enable-expert-parallel", f"on {ranks} die", why, "leave it out"))
    rows = mc2_rows(config)
    needed, given = device_memory.mc2_buffsize(model, rows), device_memory.buffsize(os.environ)
    if needed > given:
        why = f"on an A3 {ranks} ranks send each other up to {rows} rows each, which takes {needed} MB"
        remedy = f"set HCCL_BUFFSIZE={needed} on all ranks, or lower --max-num-seqs"
        raise InputError(Refusal("HCCL_BUFFSIZE", given, why, remedy))
    if os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        logger.warning(
            "HCCL_OP_EXPANSION_MODE=AIV beside --enable-expert-parallel made an A3 hang for five minutes and end with "
            "107020 (vllm-ascend issues 13688, 14928, on CANN 9.0.0): unset it if the next step hangs."
        )


def _rank(config: VllmConfig, device: torch.device) -> Rank:
    """Returns this rank's part of each layer, as vLLM will split it."""
    model, parallel, hf = config.model_config, config.parallel_config, config.model_config.hf_config
    parts, experts_here = expert_share(config)
    return Rank(
        device,
        model.dtype,
        REPEATS,
        hf.hidden_size,
        hf.intermediate_size // parts,
        hf.num_local_experts,
        experts_here,
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        short=True,
    )


@functools.cache
def routed(rank: Rank) -> None:
    """Raises InputError for wrong routing or experts if CANN's operators compute them."""
    if _is_of_cann(select_kernel(ROUTE, *route_call(rank.dtype))):
        _refuse("routing computes", _wrong(experts.routing(rank)), ROUTE.name)
    call = experts_call(
        FEW_ROWS + 1,
        dtype=rank.dtype,
        weight=rank.dtype,
        num_experts=rank.experts,
        hidden_size=rank.hidden,
        intermediate_size=rank.inner,
        expert_parallel=rank.is_part,
    )
    if _is_of_cann(select_kernel(EXPERTS, *call)):
        _refuse("experts compute", _wrong(experts.results(rank)), EXPERTS.name)


@functools.cache
def around(rank: Rank) -> None:
    """Raises InputError for wrong projections or norms, which have no other kernel."""
    _refuse("projections or norms compute", _wrong(dense.results(rank)))


def tell_what_was_seen(device: torch.device) -> None:
    """Logs one line if the doctor never tested this CANN here, or found wrong results."""
    here = record.stack(name_of(device))
    seen = record.read().get(here)
    if seen is None:
        logger.warning(
            "%s was never tested whole here, and results of another release prove nothing about it: "
            "`npu-gptoss doctor` tests it in a minute. The start itself makes the short tests only.",
            here,
        )
    elif seen.wrong:
        logger.warning("%s: the doctor found wrong results on %s: %s.", here, seen.when, ", ".join(seen.wrong))


def _is_of_cann(selected: SelectedKernel) -> bool:
    """True if CANN's operator is selected. Another kernel is the user's choice and has none of CANN's defects."""
    return selected.kernel.solution == "ascend"


def _refuse(what: str, wrong: list[Result], operation: str = "") -> None:
    """Raises InputError if a result is wrong. operation: the one with a plain torch kernel as a workaround."""
    if not wrong:
        return
    variable = f"NPU_GPTOSS_KERNEL_{operation.replace('.', '_').upper()}"
    way_out = f", or set {variable}=small_ops (plain torch operators, with --enforce-eager)" if operation else ""
    sentence = (
        f"{what} wrong results on this card, and text would be wrong without an error: "
        f"{'; '.join(result.sentence() for result in wrong)}. Install another release of CANN{way_out}, and report it "
        "with `npu-gptoss doctor --json`."
    )
    logger.error("%s", sentence)
    raise InputError(sentence)
