"""Registers the MXFP4 checkpoint format of gpt-oss under a separate name.

vLLM ties two unwanted things to the name "mxfp4" (padding of the hidden size, a loader that moves every tensor to
CUDA), and vllm-ascend claims any quantised checkpoint as "ascend". So our format claims the checkpoint before either.
The weights are expanded to the model's dtype while they load (loading.py), or the experts stay packed
(expert_weights.py); vLLM need not know.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.serving.releases.vllm import MXFP4_NAME as NAME
from npu_gptoss.serving.releases.vllm import MXFP4_NAMES, QuantizationConfig

RIVALS = ("ascend",)  # formats that would claim the checkpoint too, if vLLM asked them first


class OurConfig(QuantizationConfig):
    """vLLM's interface of a quantization, for weights that are in the model's dtype after loading."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class GptOssMxfp4Config(OurConfig):
    """The format "MXFP4 on disk, the model's dtype in memory"."""

    # vllm-ascend's RMSNorm looks for biases of its own formats in any quantization
    quant_description: ClassVar[dict[str, Any]] = {}

    def get_name(self) -> str:
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GptOssMxfp4Config:
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: object = None
    ) -> str | None:
        claimed = hf_quant_cfg.get("quant_method") in MXFP4_NAMES and user_quant in (None, *MXFP4_NAMES, NAME)
        return NAME if claimed else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> None:
        # Our model gives this config to none of its layers, so this layer belongs to another model.
        raise InputError(
            f"{prefix} belongs to a model that is not gpt-oss, and npu-gptoss expands MXFP4 checkpoints of gpt-oss "
            "only: leave the plugin out with VLLM_PLUGINS to load this checkpoint",
            field=prefix,
        )


def register() -> None:
    """Registers the format with vLLM, ahead of every rival, and with platforms that keep a list. Idempotent."""
    from npu_gptoss.serving.releases.vllm import QUANTIZATION_METHODS, current_platform, register_quantization_config

    methods = QUANTIZATION_METHODS
    if NAME not in methods:
        register_quantization_config(NAME)(GptOssMxfp4Config)
    if methods.index(NAME) > min((methods.index(rival) for rival in RIVALS if rival in methods), default=len(methods)):
        # vLLM asks the formats in this order; its parser and config refer to this list object
        methods.remove(NAME)
        methods.insert(0, NAME)
    supported = current_platform.supported_quantization
    if supported and NAME not in supported:
        supported.append(NAME)
