"""Skips host work that repeats unchanged between decode steps (vLLM 0.33, V2 runner). At batch 1 the host limits the
step.

Consecutive decode steps have the same requests in the same order, with the same parameters. Each repair compares the
data for the device with the data sent last, and sends only changes.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import RUNNER_0_33

if TYPE_CHECKING:
    import torch

UNTIL = "vLLM keeps what does not change between steps"
_STAGED = "_npu_gptoss_staged"


@repair("unchanged-tables", "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.copy_to_uva", releases="0.33", until=UNTIL)
def install_tables(buffers: ModuleType) -> None:
    """At every step thirteen tables with a row per request (temperatures, biases, block counts, …) are copied for the
    device, changed or not."""
    table = buffers.UvaBackedTensor
    expect_source(table.copy_to_uva, "self.gpu = self.pool.copy_to_uva(self.np[:n] if n is not None else self.np)")
    expect_source(buffers.UvaBufferPool.copy_to_uva, "self._curr = (self._curr + 1) % self.max_concurrency")

    @around(table, "copy_to_uva")
    def copy_to_uva(original: Original, self: Any, n: int | None = None) -> torch.Tensor:
        if n is not None:
            return original(self, n)
        staged, content = vars(self).get(_STAGED), self.np.tobytes()
        if staged is not None and staged[0] is self.gpu and staged[1] == content:
            return self.gpu
        original(self)
        setattr(self, _STAGED, (self.gpu, content))
        return self.gpu


@repair("unchanged-rows", f"{RUNNER_0_33}:async_tensor_h2d", releases="0.33", until=UNTIL)
def install_rows(runner: ModuleType) -> None:
    """At every step the request of each batch row, and the start of its tokens, are copied to the device, each time
    through newly pinned memory."""
    import numpy as np
    import torch

    expect_source(
        runner.GPUModelRunner.prepare_inputs,
        "idx_mapping = async_tensor_h2d(idx_mapping_np, device=self.device, dtype=torch.int64)",
        "async_tensor_h2d(query_start_loc_np, out=query_start_loc)",
    )
    made: tuple[Any, torch.Tensor] | None = None  # source and tensor, which is never written to
    # target, content, and the target's version, which every other write raises
    written: tuple[torch.Tensor, bytes, int] | None = None

    @around(runner, "async_tensor_h2d")
    def async_tensor_h2d(
        original: Original,
        data: Any,
        device: Any = None,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        nonlocal made, written
        if isinstance(data, np.ndarray) and out is None and dtype == torch.int64:
            key = (device, data.dtype, data.shape, data.tobytes())
            if made is None or made[0] != key:
                made = key, original(data, device=device, dtype=dtype)
            return made[1]
        if isinstance(data, np.ndarray) and out is not None and dtype is None and not out.is_inference():
            content = data.tobytes()
            if written is not None and written[0] is out and written[1:] == (content, out._version):
                return out
            original(data, out=out)
            written = out, content, out._version
            return out
        return original(data, device=device, dtype=dtype, out=out)


@repair("unchanged-views", f"{RUNNER_0_33}:build_slot_mappings_by_layer", releases="0.33", until=UNTIL)
def install_views(runner: ModuleType) -> None:
    """At every step the views of one slot buffer are made again and stored under the name of every layer."""
    expect_source(runner.build_slot_mappings_by_layer, "slot_mappings_by_layer[layer_name] = slot_mapping")
    last: tuple[Any, Any, dict[str, torch.Tensor]] | None = None

    @around(runner, "build_slot_mappings_by_layer")
    def build_slot_mappings_by_layer(
        original: Original, slot_mappings: torch.Tensor, kv_cache_config: Any
    ) -> dict[str, torch.Tensor]:
        nonlocal last
        place = slot_mappings.data_ptr(), slot_mappings.shape, slot_mappings.stride(), slot_mappings.dtype
        if last is None or last[0] is not kv_cache_config or last[1] != place:
            last = kv_cache_config, place, original(slot_mappings, kv_cache_config)
        return last[2]
