"""The release of this process, for the handlers: `from npu_gptoss.serving.openai.release import release`."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from npu_gptoss.serving.lines import here


@functools.cache
def release() -> ModuleType:
    """`release_0_11` or the sibling of the installed vLLM."""
    return importlib.import_module(f"npu_gptoss.serving.openai.release_{here().name.replace('.', '_')}")
