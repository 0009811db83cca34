"""FULL_DECODE_ONLY: decode steps replayed as one graph, attention included (`captured`); also FULL_AND_PIECEWISE's.

No hardware has run this yet. CANN 8.3 as published refuses to say how much workspace the call needs in TND, which is
then reckoned; on 9.1 a call with other lengths may be another kernel. So it is tried out when the runner starts
(`probe`); if anything fails, graphs are captured around attention (PIECEWISE) instead.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from npu_gptoss.attention import ascend
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.kernels import select_kernel, signature
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.ascend import captured, limits, probe, start_check

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

logger = logging.getLogger("vllm.npu_gptoss")


def guard(runner: Any) -> None:
    """Lets steps that do not fit into a graph's single call run without a full graph, where the call is split."""
    from npu_gptoss.serving.lines import ascend as line

    config = runner.vllm_config
    if config.model_config.hf_config.model_type == MODEL_TYPE:
        line.guard(runner, lambda seq_lens: captured.fits_one_call(seq_lens, config))


def _objection(config: VllmConfig, device: torch.device) -> str | None:
    """Why decode steps cannot be captured as a whole here; None when they can."""
    from npu_gptoss.serving.lines.ascend import layout_objection

    if objection := layout_objection(config.parallel_config):
        return objection
    model = config.model_config
    if other := _other_kernel(model.dtype, model.get_head_size(), config.cache_config.block_size):
        return f"attention runs {other}, and a full decode graph holds CANN's operator"
    heads, kv_heads = (
        model.get_num_attention_heads(config.parallel_config),
        model.get_num_kv_heads(config.parallel_config),
    )
    start_check.attention(heads, kv_heads, model.dtype, device)
    if objection := limits.event_objection():
        return objection
    if ascend.heads_kept_apart():
        return "this CANN merges heads wrongly, and the way round is not in a graph's single call"
    return probe.full_graph_objection(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.get_head_size(),
        window=model.hf_config.sliding_window,
        dtype=model.dtype,
        device=device,
    )


def _other_kernel(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """The kernel that attention runs in steps without a full graph, if it is none of `attention/ascend.py`."""
    call = signature(query=dtype, kv=dtype, sinks=dtype)
    for sliding_window in (False, True):
        traits = {"head_dim": head_dim, "block_size": block_size, "sliding_window": sliding_window}
        kernel = select_kernel(PAGED, call, {**traits, "group_size": 8, "max_query_len": 1}).kernel
        if kernel.solution != "ascend":
            return kernel.name
    return None


def prepare(config: VllmConfig, device: torch.device) -> None:
    """Before the runner reads its configuration: makes sure that this card computes rightly, and keeps full graphs if
    they work here; else turns to PIECEWISE."""
    model, compilation = config.model_config, config.compilation_config
    if model.hf_config.model_type != MODEL_TYPE:
        return
    start_check.rest(config, device)
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return
    objection = _objection(config, device)
    if objection is None:
        return
    logger.warning("FULL_DECODE_ONLY does not work here (%s); graphs are captured PIECEWISE instead.", objection)
    from npu_gptoss.serving.lines.ascend import capture_piecewise

    capture_piecewise(config)
