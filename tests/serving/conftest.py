"""vLLM engines in this process: stock `LLM`, the plugin found by its entry point, nothing between test and kernels."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, so that a test can reach the model
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter into which vLLM loads no plugin."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"VLLM_PLUGINS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def found(name: str, *modules: str) -> Any:
    """The class of this name in the first of these modules that the release has; None if none has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    return None


def _give_cache_back(worker: Any) -> None:
    """Frees an engine's KV cache, a GiB: vLLM keeps its model until the process ends."""
    runner = worker.model_runner
    runner.kv_caches.clear()
    for layer in runner.compilation_config.static_forward_context.values():
        if hasattr(layer, "kv_cache"):
            layer.kv_cache.clear()


@pytest.fixture(scope="module")  # the environment is taken back after each file
def start_engine() -> Iterator[Callable[..., LLM]]:
    """Starts an engine on a checkpoint without a tokenizer: prompts are token ids. Keywords go to `LLM`."""
    engines: list[LLM] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)

        def start(directory: Path, **options: Any) -> LLM:
            from vllm import LLM

            settings = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "max_logprobs": -1, "seed": 0}
            engines.append(LLM(str(directory), skip_tokenizer_init=True, **{**settings, **options}))
            return engines[-1]

        yield start
    for engine in engines:
        engine.collective_rpc(_give_cache_back)
