"""YaRN as gpt-oss was trained, in vLLM's own model (on platforms where ours steps aside).

gpt-oss's config.json says `truncate: false`: the ends of YaRN's ramp are not rounded. vLLM 0.11.0 does not read it and
rounds them, which turns nine of the 32 frequencies wrong. Where our model serves, `serving/rotary.py` fills the same
cache; this is for the stock model, whose defects are mended only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair

if TYPE_CHECKING:
    from transformers import GptOssConfig

_FILLED = "npu_gptoss_unrounded"


def fill(rotary: Any, config: GptOssConfig) -> None:
    """Write the unrounded cosines and sines into vLLM's rotary object, which its layers share."""
    from npu_gptoss.model.config import YarnScaling
    from npu_gptoss.model.rope import cos_sin_cache

    scaling = config.rope_scaling
    if scaling.get("truncate", True) or getattr(rotary, _FILLED, False):
        return
    yarn = YarnScaling(
        factor=float(scaling["factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        beta_fast=float(scaling["beta_fast"]),
        beta_slow=float(scaling["beta_slow"]),
        truncate=False,
    )
    cache = rotary.cos_sin_cache
    yarn_of_model = SimpleNamespace(head_dim=config.head_dim, rope_theta=config.rope_theta, rope_scaling=yarn)
    cache.copy_(cos_sin_cache(yarn_of_model, cache.shape[0], cache.dtype))
    setattr(rotary, _FILLED, True)


@repair("yarn-truncate", "vllm.model_executor.models.gpt_oss:OAIAttention.__init__", upstream="vllm PR 27722")
def install(module: ModuleType) -> None:
    """vLLM's own gpt-oss rounds the ends of YaRN's ramp although the config says truncate: false, so that nine of
    32 frequencies are wrong; our model fills the cache by itself."""
    attention = module.OAIAttention
    expect_parameters(attention.__init__, "self", "config")
    expect_source(attention.__init__, "self.rotary_emb = get_rope(", 'config.rope_scaling["beta_slow"]')

    @around(attention, "__init__")
    def __init__(original: Callable[..., None], self: Any, config: GptOssConfig, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        fill(self.rotary_emb, config)
