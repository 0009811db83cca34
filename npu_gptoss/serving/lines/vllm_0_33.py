"""vLLM 0.33.0: where its names are. No row of `LINES` yet: the shapes that it changed are to be written.

`FusedMoE` is a function there (`FusedMoEFactory`), `apply` of an experts' method gets the routed tokens, a step's
lengths are on the device alone, and `get_rope` takes one mapping.
"""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import resolve, vllm_0_11

_BACKEND = "vllm.v1.attention.backend"
_EXPERTS = "vllm.model_executor.layers.fused_moe"
# name in 0.11.0 -> its module in 0.33.0
MOVED = {
    "Attention": "vllm.model_executor.layers.attention",
    "AttentionBackend": _BACKEND,
    "AttentionImpl": _BACKEND,
    "AttentionLayer": _BACKEND,
    "AttentionMetadataBuilder": _BACKEND,
    "AttentionType": _BACKEND,
    "CommonAttentionMetadata": _BACKEND,
    "FusedMoEMethodBase": _EXPERTS,
    "determine_expert_map": f"{_EXPERTS}.expert_map_manager",
}
RENAMED = {"FusedMoE": "FusedMoEFactory"}

MODULES: dict[str, tuple[str, ...]] = {}
for _module, _names in vllm_0_11.MODULES.items():
    for _name in _names:
        MODULES.setdefault(MOVED.get(_name, _module), ())
        MODULES[MOVED.get(_name, _module)] += (RENAMED.get(_name, _name),)


def __getattr__(name: str) -> Any:
    return resolve(MODULES, RENAMED.get(name, name))
