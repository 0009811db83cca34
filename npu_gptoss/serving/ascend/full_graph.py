"""FULL_DECODE_ONLY: decode steps replayed as one graph, attention included (`captured`).

No hardware has run this yet, and CANN 8.3 as published refuses to say how much workspace the call needs in TND, which
is then reckoned. So it is tried out when the runner starts (`probe`); if anything fails, graphs are captured around
attention (PIECEWISE) instead.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from npu_gptoss.attention import ascend
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.kernels import select_kernel, signature
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.ascend import probe, start_check
from npu_gptoss.serving.lines.vllm import CUDAGraphMode

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

logger = logging.getLogger("vllm.npu_gptoss")


def guard(runner: Any) -> None:
    """Lets steps that do not fit into a graph's single call run without a graph, where the call is split."""
    dispatcher = runner.aclgraph_dispatcher
    right = dispatcher.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> tuple[CUDAGraphMode, Any]:
        mode, descriptor = right(*args, **kwargs)
        builders = (group.get_metadata_builder() for groups in runner.attn_groups for group in groups)
        if mode == CUDAGraphMode.FULL and not all(getattr(builder, "fits_one_call", True) for builder in builders):
            return CUDAGraphMode.NONE, None
        return mode, descriptor

    dispatcher.dispatch = dispatch


def _objection(config: VllmConfig, device: torch.device) -> str | None:
    """Why decode steps cannot be captured as a whole here; None when they can."""
    if config.parallel_config.pipeline_parallel_size > 1:
        return "vllm-ascend 0.11.0 captures no stage of a pipeline as a whole"
    if config.parallel_config.data_parallel_size > 1:
        # a rank without requests replays its decode graph while another computes a prompt of a captured size: the
        # graph gathers, the other multicasts, and each takes the other's data for its own
        return "vllm-ascend 0.11.0 lets one rank of data parallelism replay decodes while another computes a prompt"
    model = config.model_config
    if other := _other_kernel(model.dtype, model.get_head_size(), config.cache_config.block_size):
        return f"attention runs {other}, and a full decode graph holds CANN's operator"
    heads, kv_heads = (
        model.get_num_attention_heads(config.parallel_config),
        model.get_num_kv_heads(config.parallel_config),
    )
    start_check.attention(heads, kv_heads, model.dtype, device)
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
    """Before the runner reads its configuration: makes sure that this card computes rightly, and keeps FULL_DECODE_ONLY
    if it works here; else turns to PIECEWISE."""
    model, compilation = config.model_config, config.compilation_config
    if model.hf_config.model_type != MODEL_TYPE:
        return
    start_check.rest(config, device)
    if compilation.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
        return
    objection = _objection(config, device)
    if objection is None:
        return
    logger.warning("FULL_DECODE_ONLY does not work here (%s); graphs are captured PIECEWISE instead.", objection)
    from npu_gptoss.serving.lines.ascend import capture_piecewise

    capture_piecewise(config)
