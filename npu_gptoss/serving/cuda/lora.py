"""vLLM's LoRA adapters in our model: loaded, cached, evicted and assigned to requests by vLLM's own managers.

vLLM's manager wraps vLLM's layers, of which our model has none, and reads adapters by their names. `AdapterManager`
has one module in their place, `Adapters`, and `WorkerManager` reads adapters as `npu-gptoss convert` does: so an
adapter that is served is the one that would be merged.

A step in which no request has an adapter runs the model's own kernels, in graphs of its own
(`cudagraph_specialize_lora`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_gptoss.convert.lora import factors, open_adapter
from npu_gptoss.errors import InputError, short
from npu_gptoss.model.adapters import Adapters, Factors
from npu_gptoss.model.layout import expected_tensors
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.patch import replace as put
from npu_gptoss.serving.releases.vllm import (
    AdapterLRUCache,
    LoRAAdapterNotFoundError,
    LoRAModel,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    VllmConfig,
    get_adapter_absolute_path,
    lora_model_runner_mixin,
)

MODULE = "adapters"  # the only one that vLLM's managers see


@dataclass
class Weights:
    """One adapter in vLLM's cache on the host. lora_a: by official name; vLLM hands both fields to `set_lora`."""

    lora_a: Mapping[str, Factors]
    lora_b: None = None


@dataclass(frozen=True)
class Slots:
    """The slots on the GPU, as vLLM's managers write a module's."""

    adapters: Adapters

    def set_lora(self, index: int, lora_a: Mapping[str, Factors], lora_b: None) -> None:
        self.adapters.write(index, lora_a)


class AdapterManager(LRUCacheLoRAModelManager):
    """vLLM's caches of adapters on the host and on the GPU, without its layers."""

    def __init__(self, *, model: Any, lora_config: Any, vllm_config: VllmConfig, **_: Any) -> None:
        scheduler, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
        rows = max(scheduler.max_num_batched_tokens, graphs.max_cudagraph_capture_size or 0)
        adapters = Adapters(model.gptoss, lora_config.max_loras, lora_config.max_lora_rank, rows)
        self.model, self.lora_config, self.modules = model, lora_config, {MODULE: Slots(adapters)}
        self.supports_mm = self.is_pooling_model = False
        self._registered_adapters = AdapterLRUCache(self.capacity, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(self.lora_slots, self._deactivate_adapter)
        self.lora_index_to_id = [None] * self.lora_slots
        self._last_mapping = self._last_slot_layout = None
        model.adapters = adapters
        held = lora_config.max_loras, lora_config.max_lora_rank, adapters.bytes / 2**30
        logger.info("npu-gptoss holds %d LoRA adapters up to rank %d in %.2f GiB of the GPU.", *held)

    def _add_adapter(self, lora: LoRAModel) -> None:
        self._registered_adapters[lora.id] = lora

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: Any = None) -> LoRAModel:
        return LoRAModel(lora_id, rank, {MODULE: Weights({})})

    def set_adapter_mapping(self, mapping: Any) -> None:
        """vLLM calls it before each step and each capture. Without an adapter nothing is sent to the GPU."""
        self.model.adapters.active = any(mapping.prompt_mapping)
        if self.model.adapters.active:
            super().set_adapter_mapping(mapping)

    def _set_adapter_mapping(self, mapping: Any) -> None:
        ids = np.asarray(mapping.index_mapping)
        of_token = np.full(len(self.model.adapters.of_token), -1, np.int32)
        for slot, lora_id in enumerate(self.lora_index_to_id):
            if lora_id is not None:
                of_token[: len(ids)][ids == lora_id] = slot
        self.model.adapters.assign(torch.from_numpy(of_token))


class WorkerManager(LRUCacheWorkerLoRAManager):
    _manager_cls = AdapterManager

    def _load_adapter(self, lora_request: Any) -> LoRAModel:
        """Raises InputError for what cannot be served beside the base, and vLLM's error for a missing folder."""
        model = self._adapter_manager.model
        folder = Path(get_adapter_absolute_path(lora_request.lora_path))
        if not folder.is_dir():
            raise LoRAAdapterNotFoundError(lora_request.lora_name, lora_request.lora_path)
        specs = expected_tensors(replace(model.config, quantization=None))
        read = open_adapter(folder, 1.0, model.config, specs)
        whole = [name for name, deltas in read.deltas.items() if any("magnitude_vector" in d.factors for d in deltas)]
        try:
            if whole := [*read.replaced, *whole]:
                why = f"{short(whole[0])} is replaced or rescaled (modules_to_save, DoRA)"
                raise InputError(why, field=whole[0])
            made = {name: factors(deltas, specs[name].shape) for name, deltas in read.deltas.items()}
            model.adapters.check(made)
        except InputError as error:
            remedy = f"or merge it: `npu-gptoss convert {model.checkpoint} MERGED --lora {folder}`"
            raise InputError(f"{folder}: {error}; {remedy}", field=error.field) from None
        dtype = model.gptoss.dtype
        held = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in made.items()}
        return LoRAModel(lora_request.lora_int_id, model.adapters.rank, {MODULE: Weights(held)})


def take_over() -> None:
    """Makes vLLM's runner create our manager. Call it in the process that serves our model."""
    if lora_model_runner_mixin.LRUCacheWorkerLoRAManager is not WorkerManager:
        put(lora_model_runner_mixin, "LRUCacheWorkerLoRAManager", WorkerManager)
