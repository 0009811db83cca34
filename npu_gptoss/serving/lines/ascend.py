"""vllm-ascend's names and shapes, as the line of this process has them; as `lines.vllm` for vLLM's."""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import here


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked for by the import system
        raise AttributeError(name)
    return getattr(here().module("ascend"), name)
