"""Decides once, before any allocation, to keep the experts of an MXFP4 checkpoint packed or to expand them.

On Ascend memory decides (`npu_gptoss.model.device_memory`) unless the variable does; elsewhere only the variable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import platform, signature
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.model import device_memory
from npu_gptoss.model.config import GptOssConfig, packed_columns
from npu_gptoss.model.device_memory import AUTO, PACKED, VARIABLE, Part
from npu_gptoss.moe import expert_format, keeps_format
from npu_gptoss.moe.operations import experts_call
from npu_gptoss.moe.packed import rows_of
from npu_gptoss.serving import logger, releases
from npu_gptoss.serving.ascend import limits
from npu_gptoss.serving.releases.vllm import (
    current_platform,
    expert_share,
    get_dp_group,
    get_pp_group,
    get_pp_indices,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

ON_ASCEND, EXPANDS = "moe.experts.ascend_packed", "moe.expand.triton_ascend"


def kept_packed(vllm_config: VllmConfig, config: GptOssConfig) -> bool:
    """Raises InputError if the variable's choice is impossible, or if no choice fits the card's memory."""
    wish, device = envs.get(VARIABLE), current_platform.device_type
    stage = get_pp_group()
    parts, (first, end) = expert_share(vllm_config)
    start_layer, end_layer = get_pp_indices(config.num_hidden_layers, stage.rank_in_group, stage.world_size)
    part = Part(
        ranks=get_tensor_model_parallel_world_size(),
        parts=parts,
        experts=end - first,
        layers=end_layer - start_layer,
        ends=stage.is_first_rank + stage.is_last_rank,
    )
    objection = objection_of(config, part, vllm_config.model_config.dtype, device)
    if wish == PACKED and objection:
        raise InputError(f"{VARIABLE}=packed: {objection}", field=VARIABLE)
    if device != "npu":
        return wish == PACKED
    devices = part.ranks * get_dp_group().world_size
    model, cache = vllm_config.model_config, vllm_config.cache_config
    choice = device_memory.choose(
        config,
        part,
        model.max_model_len,
        torch.npu.mem_get_info()[1],
        cache.gpu_memory_utilization,
        hccl=device_memory.hccl_bytes(devices, device_memory.buffsize(os.environ)),
        in_flight=tokens_in_flight(vllm_config),
        objection=objection,
        wish=wish,
    )
    # From vLLM 0.23 on a length of -1 (auto) is set to fit, and a given cache size overrides the utilisation.
    vllm_reckons_otherwise = getattr(model, "original_max_model_len", None) == -1 or cache.kv_cache_memory_bytes
    if choice.hopeless and wish == AUTO and not vllm_reckons_otherwise:
        ways = "expanded" if objection else "expanded or packed"
        sentence = (
            f"{choice.sentence()}. Use more cards, a shorter --max-model-len or a higher --gpu-memory-utilization; "
            f"{VARIABLE}={ways} loads without this check."
        )
        logger.error("%s", sentence)
        raise InputError(sentence, field="--gpu-memory-utilization")
    if config.quantization is not None and stage.is_first_rank and get_tensor_model_parallel_rank() == 0:
        logger.info("%s.", choice.sentence())
        if choice.packed and (other := limits.other_triton()):
            logger.warning("%s.", other)
        if choice.packed and envs.get(expert_format.VARIABLE) == "nz":
            logger.warning(
                "%s=nz: packed experts are expanded in ND; for FRACTAL_NZ set %s=expanded.",
                *(expert_format.VARIABLE, VARIABLE),
            )
    return choice.packed


def tokens_in_flight(vllm_config: VllmConfig) -> int | None:
    """Returns the most that are scheduled and not yet computed; None if layers with a window keep all keys."""
    if not releases.here().window_groups or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return None
    return vllm_config.max_concurrent_batches * vllm_config.scheduler_config.max_num_batched_tokens


def objection_of(config: GptOssConfig, part: Part, dtype: torch.dtype, device: str) -> str:
    """Returns why the experts cannot stay packed, as actual value and remedy; "" if they can."""
    if config.quantization is None:
        return f"these experts are not in MXFP4; take the official checkpoint, or leave {VARIABLE} unset"
    if device != "npu":
        expanded = f"no kernel here computes with packed experts, so they would be expanded; leave {VARIABLE} unset"
        return "" if keeps_format("mxfp4", dtype) else expanded
    call = experts_call(
        1,
        dtype=dtype,
        weight="mxfp4",
        num_experts=config.num_local_experts,
        hidden_size=config.hidden_size,
        intermediate_size=part.columns(config, packed=True),
        expert_parallel=part.experts < config.num_local_experts,
    )
    calls = [(ON_ASCEND, *call)]
    # Sizes that the card's kernel has no room for would fall back to plain operators, which read from the device in
    # every step, and no graph can capture that. Ranks may differ in width.
    width = config.intermediate_size // part.parts
    inner = {packed_columns(rank, width) for rank in range(part.parts)}
    for columns in sorted({config.hidden_size, *(2 * each for each in inner)}):
        calls.append((EXPANDS, signature(out=dtype), {"quarter": rows_of(columns) * columns}))
    for name, *asked in calls:
        if reasons := reasons_against(registry.kernels[name], *asked, platform=platform.current_platform()):
            return f"{name} {'; '.join(reasons)}"
    return ""
