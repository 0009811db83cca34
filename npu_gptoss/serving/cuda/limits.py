"""What the model for NVIDIA GPUs does not do, said before anything is loaded. Imports no vLLM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from npu_gptoss import envs
from npu_gptoss.model.config import uncut_objection
from npu_gptoss.model.device_memory import AUTO, PACKED, VARIABLE

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

# vLLM's graphs that break off at a function, in place of those that torch.compile cuts
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def objections(config: VllmConfig) -> list[str]:
    """As `limits.objections`."""
    parallel, model, offload = config.parallel_config, config.model_config, config.offload_config
    positions = model.hf_config.max_position_embeddings  # rows of the table of rotary angles
    mxfp4, wish = bool(getattr(model.hf_config, "quantization_config", None)), envs.get(VARIABLE)
    uncut = uncut_objection(model.hf_config.intermediate_size, parallel.tensor_parallel_size)
    refused = {
        "--load-format dummy: the weights are made when they are loaded; give the path of a checkpoint": (
            config.load_config.load_format == "dummy"
        ),
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: use --tensor-parallel-size": (
            parallel.pipeline_parallel_size > 1
        ),
        uncut or "": bool(uncut) and mxfp4 and not parallel.enable_expert_parallel,
        f"{VARIABLE}={wish}: experts stay in the checkpoint's format on NVIDIA GPUs; unset it": (
            wish != AUTO and mxfp4 != (wish == PACKED)
        ),
        "--enable-expert-parallel with --data-parallel-size: the ranks of --tensor-parallel-size share the experts; "
        "leave one of the two out": parallel.enable_expert_parallel and parallel.data_parallel_size > 1,
        f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}: leave it out": (
            parallel.prefill_context_parallel_size > 1
        ),
        f"--max-model-len {model.max_model_len}: the checkpoint has {positions} positions; ask for no more": (
            model.max_model_len > positions
        ),
        f"--ubatch-size {parallel.ubatch_size}: steps are not halved; leave it out": parallel.ubatch_size > 1,
        "--cpu-offload-gb and --offload-group-size: the weights stay on the GPU; leave them out": (
            offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0
        ),
        "--weight-transfer-config: the weights of a running server stay as they are; leave it out": (
            config.weight_transfer_config is not None
        ),
        "--enable-prompt-embeds: prompts are text or token ids; leave it out": model.enable_prompt_embeds,
        "VLLM_USE_V2_MODEL_RUNNER=0: the model is written for the second model runner; unset it": (
            not config.use_v2_model_runner
        ),
        f"{BREAKABLE}=0: the model is not compiled, so graphs break off at its attention; unset it": (
            os.environ.get(BREAKABLE) == "0"
        ),
    }
    return [sentence for sentence, wrong in refused.items() if wrong]


def choose_graphs() -> None:
    """Before vLLM decides how it captures."""
    os.environ.setdefault(BREAKABLE, "1")
