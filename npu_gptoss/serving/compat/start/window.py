"""gpt-oss has no model-wide sliding window.

vLLM's `ModelConfig.get_sliding_window` reads the number from config.json (128). It has two users in 0.11.0. The check
whether the V1 engine can be used refuses every model that has one on CPU, and V0 is gone. And `cache_config` gets it
when the layers do not alternate, from where `Attention` takes it for every layer that names no window of its own. In
gpt-oss every second layer sees everything, and our model hands each layer's window to its own attention.
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
    """vLLM refuses any model with a sliding window on CPU, and gives a model whose layers all slide one window for
    all; gpt-oss's window is a matter of the layer, and its attention gets it from our model."""
    model_config = module.ModelConfig
    expect_source(model_config.get_sliding_window, 'getattr(self.hf_text_config, "sliding_window", None)')

    @around(model_config, "get_sliding_window")
    def get_sliding_window(original: Callable[..., int | None], self: Any) -> int | None:
        """None for gpt-oss, the number of config.json for any other model."""
        if self.hf_text_config.model_type == MODEL_TYPE and not self.disable_sliding_window:
            return None
        return original(self)
