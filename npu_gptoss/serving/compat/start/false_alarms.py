"""Warnings that vLLM prints at every start of gpt-oss and that ask nothing of the user. Each repair ends its cause.

Two more have their cause elsewhere: `serving/platform.py` (no `vllm._C`), `plugin.py` (a model registered already).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace

MANY_FILES = 4096  # open files; each client takes one


@repair(
    "open-files",
    "vllm.utils vllm.entrypoints.openai.api_server:set_ulimit",
    until="vLLM raises the limit as far as the machine allows",
)
def install_open_files(module: ModuleType) -> None:
    """vLLM asks for 65535 open files, gets none more where the machine allows fewer, and warns of it."""
    _install_open_files(module, "vllm.entrypoints.openai.api_server")


@repair(
    "open-files",
    "vllm.utils.system_utils vllm.entrypoints.openai.api_server:set_ulimit",
    lines=("0.23",),
    until="vLLM raises the limit as far as the machine allows",
)
def install_open_files_0_23(module: ModuleType) -> None:
    """vLLM asks for 65535 open files, gets none more where the machine allows fewer, and warns of it."""
    _install_open_files(module, "vllm.entrypoints.openai.api_server")


@repair(
    "open-files",
    "vllm.utils.system_utils vllm.entrypoints.launchers.launcher:set_ulimit",
    lines=("0.33",),
    until="vLLM raises the limit as far as the machine allows",
)
def install_open_files_0_33(module: ModuleType) -> None:
    """vLLM asks for 65535 open files, gets none more where the machine allows fewer, and warns of it."""
    _install_open_files(module, "vllm.entrypoints.launchers.launcher")


def _install_open_files(module: ModuleType, copy: str) -> None:
    import resource

    expect_parameters(module.set_ulimit, "target_soft_limit")

    @around(module, "set_ulimit", copies=(copy,))
    def set_ulimit(original: Callable[[int], None], target_soft_limit: int = 65535) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = most == resource.RLIM_INFINITY or most >= MANY_FILES
        original(min(target_soft_limit, most) if enough and most != resource.RLIM_INFINITY else target_soft_limit)


@repair("no-pinned-memory", "vllm.platforms.cpu:CpuPlatform.is_pin_memory_available", until="0.23")
def install_no_pinned_memory(module: ModuleType) -> None:
    """On a CPU vLLM warns that memory cannot be pinned, which is for copies to a device."""
    expect_source(module.CpuPlatform.is_pin_memory_available.__func__, "return False")
    replace(module.CpuPlatform, "is_pin_memory_available", classmethod(lambda cls: False))


@repair("no-graphs", "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.__init__", until="0.23")
def install_no_graphs(module: ModuleType) -> None:
    """Where no graph is to be captured, vLLM's dispatcher warns at the first step that it was given no sizes."""
    dispatcher = module.CudagraphDispatcher
    expect_source(dispatcher.__init__, "self.keys_initialized = False")

    @around(dispatcher, "__init__")
    def __init__(original: Callable[..., None], self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        if vllm_config.device_config.device_type == "cpu":
            self.keys_initialized = True


@repair("dtype-by-its-name", "vllm.config.model:_find_dtype", until="0.23")
def install_dtype_by_its_name(module: ModuleType) -> None:
    """vLLM reads a checkpoint's dtype by a name that transformers calls deprecated, in a warning."""
    expect_source(module._find_dtype, 'getattr(config, "torch_dtype", None)')

    @around(module, "_find_dtype")
    def _find_dtype(original: Callable[..., Any], model_id: str, config: Any, **keywords: Any) -> Any:
        own = config.model_type == MODEL_TYPE and getattr(config, "dtype", None)
        return own or original(model_id, config, **keywords)


@repair(
    "tools-by-us",
    "vllm.entrypoints.openai.serving_responses:OpenAIServingResponses.__init__",
    until="vLLM warns of no flag that it ignores",
)
def install_tools_by_us(module: ModuleType) -> None:
    """vLLM warns that --enable-auto-tool-choice changes nothing for gpt-oss, with it and without it."""
    _install_tools_by_us(module)


@repair(
    "tools-by-us",
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses.__init__",
    lines=("0.23", "0.33"),
    until="vLLM warns of no flag that it ignores",
)
def install_tools_by_us_0_23(module: ModuleType) -> None:
    """vLLM warns that --enable-auto-tool-choice changes nothing for gpt-oss, with it and without it."""
    _install_tools_by_us(module)


def _install_tools_by_us(module: ModuleType) -> None:
    responses, told = module.OpenAIServingResponses, "For gpt-oss, we ignore --enable-auto-tool-choice"
    expect_source(responses.__init__, told)

    @around(responses, "__init__")
    def __init__(original: Callable[..., None], self: Any, *arguments: Any, **keywords: Any) -> None:
        def others(record: Any) -> bool:
            return not str(record.msg).startswith(told)

        module.logger.addFilter(others)
        try:
            original(self, *arguments, **keywords)
        finally:
            module.logger.removeFilter(others)
