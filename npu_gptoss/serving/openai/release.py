"""Gives the handlers the module of this process's release: `from npu_gptoss.serving.openai.release import release`."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from npu_gptoss.serving.releases import here


@functools.cache
def release() -> ModuleType:
    """Returns `release_0_11` or its sibling for the installed vLLM."""
    return importlib.import_module(f"npu_gptoss.serving.openai.release_{here().name.replace('.', '_')}")
