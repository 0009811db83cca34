"""FULL_DECODE_ONLY: decode steps replayed as one graph, attention included (`captured`); also in FULL_AND_PIECEWISE.

No hardware has run this yet. CANN 8.3 as published does not report the call's workspace in TND, so it is calculated; on
9.1 a call with other lengths may use another kernel. `probe` therefore tests it when the runner starts. On failure
graphs are captured around attention (PIECEWISE) instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from npu_gptoss.attention import ascend
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.kernels import select_kernel, signature
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving import logger
from npu_gptoss.serving.ascend import captured, limits, probe, start_check

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig


def guard(runner: Any) -> None:
    """Runs steps that do not fit a graph's single call without a full graph, so that the call can be split."""
    from npu_gptoss.serving.releases import ascend as names

    config = runner.vllm_config
    if config.model_config.hf_config.model_type == MODEL_TYPE:
        names.guard(runner, lambda seq_lens: captured.fits_one_call(seq_lens, config))


def _objection(config: VllmConfig, device: torch.device) -> str | None:
    """Returns the reason why decode steps cannot be captured as a whole here; None if they can."""
    from npu_gptoss.serving.releases.ascend import layout_objection

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
        return "this CANN merges heads wrongly, and a graph's single call has no workaround"
    objection = probe.full_graph_objection(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.get_head_size(),
        window=model.hf_config.sliding_window,
        dtype=model.dtype,
        device=device,
    )
    captured.set_aside()
    return objection


def _other_kernel(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Returns the kernel that attention runs outside full graphs if it is not from `attention/ascend.py`."""
    call = signature(query=dtype, kv=dtype, sinks=dtype)
    for sliding_window in (False, True):
        traits = {"head_dim": head_dim, "block_size": block_size, "sliding_window": sliding_window}
        kernel = select_kernel(PAGED, call, {**traits, "group_size": 8, "max_query_len": 1}).kernel
        if kernel.solution != "ascend":
            return kernel.name
    return None


def prepare(config: VllmConfig, device: torch.device) -> None:
    """Checks the card's results, keeps full graphs if they work here, and else turns to PIECEWISE.

    Call it before the runner reads its configuration.
    """
    model, compilation = config.model_config, config.compilation_config
    if model.hf_config.model_type != MODEL_TYPE:
        return
    start_check.rest(config, device)
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return
    objection = _objection(config, device)
    if objection is None:
        return
    logger.warning(
        "%s does not work here (%s); graphs are captured PIECEWISE instead.", compilation.cudagraph_mode.name, objection
    )
    from npu_gptoss.serving.releases.ascend import capture_piecewise

    capture_piecewise(config)
