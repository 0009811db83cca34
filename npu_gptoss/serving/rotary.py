"""The rotary embedding object of vLLM, holding the cosines and sines of `npu_gptoss.model.rope`.

The object stays vLLM's (on Ascend the kernel is attached to the class by its name); only its cache's content is ours.
vLLM 0.11.0 rounds YaRN's ramp although gpt-oss says `truncate: false`, and it multiplies YaRN's factor into the
cosines, where bfloat16 loses precision; here the factor is in the scale of the scores. The cache has the model's dtype:
otherwise vllm-ascend converts it inside forward, and torch.compile takes that for an update of a buffer.
"""

from __future__ import annotations

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import rotation_cache
from npu_gptoss.serving.releases.vllm import RotaryEmbedding, yarn_rotary

_OWNER = "npu_gptoss_config"
_first_table: list[tuple[object, ...]] = []  # of this process


def rotary_embedding(config: GptOssConfig) -> RotaryEmbedding:
    """Returns vLLM's rotary object for this model in the current default dtype and device; layers share it."""
    rotary = yarn_rotary(config, torch.get_default_dtype())
    if getattr(rotary, _OWNER, None) != config:  # another layer of this model has not filled it yet
        cache = rotary.cos_sin_cache
        if cache.device.type == "npu":
            _check_first_table(config, cache)
        cache.copy_(rotation_cache(config, cache.shape[0], cache.dtype))
        setattr(rotary, _OWNER, config)
    return rotary


def _check_first_table(config: GptOssConfig, cache: torch.Tensor) -> None:
    """Raises InputError for a second table: torch_npu's `_npu_rotary_embedding` keeps a process's first table."""
    table = (config.rope_theta, config.rope_scaling, tuple(cache.shape), cache.dtype)
    if not _first_table:
        _first_table.append(table)
    if table != _first_table[0]:
        raise InputError(
            "the rotary operator of torch_npu keeps the table of the first model of a process, and this model has "
            f"another (theta, scaling, shape, dtype): {table} after {_first_table[0]}; start another process",
            field="rope_scaling",
        )
