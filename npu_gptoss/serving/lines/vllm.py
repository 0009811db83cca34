"""vLLM's names and shapes, as the line of this process has them: `from npu_gptoss.serving.lines.vllm import …`."""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import here


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked for by the import system
        raise AttributeError(name)
    return getattr(here().module("vllm"), name)
