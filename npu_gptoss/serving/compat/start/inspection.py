"""Inspects our model's class in the starting process, before the engine starts, instead of in another process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_source, repair

_OURS = "npu_gptoss."


@repair(
    "model-inspection",
    "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls",
    upstream="0.23.0 keeps what it found in a file",
    until="0.23",
)
def install(module: ModuleType) -> None:
    """Each start imports vLLM again in another process, only to inspect our model's class: 10 s of a start.

    vLLM caches the result for its own models in a file, but not for a plugin's. It uses another process because a
    model's import may start CUDA, and the engine is forked later; the import of ours starts no device.
    """
    owner = module._LazyRegisteredModel
    expect_source(owner.inspect_model_cls, "_run_in_subprocess(", "_ModelInfo.from_model_cls(self.load_model_cls())")

    @around(owner, "inspect_model_cls")
    def inspect_model_cls(original: Callable[[Any], Any], self: Any) -> Any:
        if not self.module_name.startswith(_OURS):
            return original(self)
        return module._ModelInfo.from_model_cls(self.load_model_cls())
