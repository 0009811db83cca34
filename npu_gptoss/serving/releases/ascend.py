"""vllm-ascend's names and shapes in the release of this process; `releases.vllm` has vLLM's."""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.releases import here


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system looks for these
        raise AttributeError(name)
    return getattr(here().module("ascend"), name)
