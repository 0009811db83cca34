"""Settings of vLLM that the model for NVIDIA GPUs refuses before loading. Imports no vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from npu_gptoss import envs
from npu_gptoss.errors import Refusal
from npu_gptoss.model.config import uncut_objection
from npu_gptoss.model.device_memory import AUTO, PACKED, VARIABLE

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

# vLLM's graphs that break off at a function, instead of torch.compile's pieces
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
INVARIANT = "VLLM_BATCH_INVARIANT"

# Values of --kv-cache-dtype for E4M3 without a scale: a cache of half the size, and answers that differ
FP8_CACHES = ("fp8", "fp8_e4m3")

# Backends of --weight-transfer-config, by what they send to: a model's load_weights, or its parameters
TRANSFERS, PARAMETERS_ONLY = ("nccl", "ipc", "nccl_m2n"), ("sparse_nccl", "sharded_rdt", "modelexpress")


def checks(config: VllmConfig) -> Iterator[tuple[bool, Refusal]]:
    """Yields each refusal, with True if this configuration asks for the setting."""
    parallel, model, offload = config.parallel_config, config.model_config, config.offload_config
    positions = model.hf_config.max_position_embeddings  # rows of the table of rotary angles
    mxfp4, wish = bool(getattr(model.hf_config, "quantization_config", None)), envs.get(VARIABLE)
    pipeline, contexts = parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    experts, length = parallel.enable_expert_parallel, model.max_model_len
    why, remedy = "the model is built while its weights load", "give the path of a checkpoint"
    yield config.load_config.load_format == "dummy", Refusal("--load-format", "dummy", why, remedy)
    narrow, skipped = config.cache_config.cache_dtype in FP8_CACHES, config.cache_config.kv_cache_dtype_skip_layers
    why = "all layers have a KV cache of one dtype"
    yield bool(skipped), Refusal("--kv-cache-dtype-skip-layers", " ".join(skipped), why)
    why = "layers cannot be split over GPUs"
    yield pipeline > 1, Refusal("--pipeline-parallel-size", pipeline, why, "use --tensor-parallel-size")
    if uncut := uncut_objection(model.hf_config.intermediate_size, parallel.tensor_parallel_size):
        yield mxfp4 and not experts, uncut
    why = "experts stay in the checkpoint's format on NVIDIA GPUs"
    yield wish != AUTO and mxfp4 != (wish == PACKED), Refusal(VARIABLE, wish, why, "unset it")
    why, remedy = "the ranks of --tensor-parallel-size share the experts", "leave out this or --data-parallel-size"
    yield experts and parallel.data_parallel_size > 1, Refusal("--enable-expert-parallel", None, why, remedy)
    yield contexts > 1, Refusal("--prefill-context-parallel-size", contexts, "each GPU keeps the whole context")
    why = f"the checkpoint has {positions} positions"
    yield length > positions, Refusal("--max-model-len", length, why, "ask for no more")
    yield parallel.ubatch_size > 1, Refusal("--ubatch-size", parallel.ubatch_size, "steps cannot be halved")
    why = "the weights stay on the GPU"
    yield offload.uva.cpu_offload_gb > 0, Refusal("--cpu-offload-gb", offload.uva.cpu_offload_gb, why)
    group = offload.prefetch.offload_group_size
    yield group > 0, Refusal("--offload-group-size", group, why)
    sender = getattr(config.weight_transfer_config, "backend", None)
    why, remedy = "it writes to vLLM's own parameters", f"use the backend {' or '.join(TRANSFERS)}"
    yield sender in PARAMETERS_ONLY, Refusal("--weight-transfer-config", sender, why, remedy)
    yield model.enable_prompt_embeds, Refusal("--enable-prompt-embeds", None, "prompts are text or token ids")
    why = "the model is written for the second model runner"
    first = os.environ.get(RUNNER) == "0"  # vLLM also chooses the first runner for --enable-dbo and some drafters
    yield first and not config.use_v2_model_runner, Refusal(RUNNER, 0, why, "unset it")
    why = "the model is not compiled, so graphs break off at its attention"
    yield os.environ.get(BREAKABLE) == "0", Refusal(BREAKABLE, 0, why, "unset it")
    if batch_invariant():
        why = "it was shown for one GPU and one row a request"
        wrong = narrow or parallel.tensor_parallel_size > 1 or bool(config.speculative_config or config.lora_config)
        remedy = "leave out --tensor-parallel-size, --speculative-config, --enable-lora and --kv-cache-dtype"
        yield wrong, Refusal(INVARIANT, 1, why, remedy)
    if (lora := config.lora_config) is not None:
        ranks, targets = parallel.tensor_parallel_size, lora.target_modules
        why = "adapters are not cut for several GPUs"
        yield ranks > 1, Refusal("--enable-lora", None, why, "leave out --tensor-parallel-size")
        yield bool(targets), Refusal("--lora-target-modules", " ".join(targets or ()), "an adapter counts whole")
        why = "each expert has its own factors"
        yield lora.enable_moe_shared_loras, Refusal("--enable-moe-shared-loras", None, why)


def batch_invariant() -> bool:
    """Tells whether the user wants each request's bits to be those that it has alone, as vLLM reads its variable."""
    return bool(int(os.environ.get(INVARIANT) or 0))


def choose_graphs() -> None:
    """Selects vLLM's breakable graphs. Call it before vLLM decides how to capture."""
    os.environ.setdefault(BREAKABLE, "1")
