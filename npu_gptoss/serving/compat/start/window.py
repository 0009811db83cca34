"""Removes gpt-oss's model-wide sliding window: each layer has its own.

vLLM's `ModelConfig.get_sliding_window` reads the number from config.json (128), for two users in 0.11.0. The check for
the V1 engine refuses every model with a window on a CPU, and V0 is gone. `cache_config` gets the number if the layers
do not alternate, and `Attention` takes it for every layer that names no window. In gpt-oss every second layer attends
to all keys, and our model passes each layer's window to its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import around, expect_source, repair


@repair(
    "model-wide-window",
    "vllm.config.model:ModelConfig.get_sliding_window",
    upstream="vllm issue 23934 (open); no repair found",
    essential=True,
    until="0.23",
)
def install(module: ModuleType) -> None:
    """vLLM refuses any model with a sliding window on a CPU, and applies one window to all layers if each has one; in
    gpt-oss the window differs by layer, and our model passes it to the attention."""
    model_config = module.ModelConfig
    expect_source(model_config.get_sliding_window, 'getattr(self.hf_text_config, "sliding_window", None)')

    @around(model_config, "get_sliding_window")
    def get_sliding_window(original: Callable[..., int | None], self: Any) -> int | None:
        """None for gpt-oss, the number of config.json for any other model."""
        if self.hf_text_config.model_type == MODEL_TYPE and not self.disable_sliding_window:
            return None
        return original(self)
