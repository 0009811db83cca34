"""Hides keys and tokens among the arguments that vLLM logs at start."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import API_SERVER

SECRET = ("api_key", "hf_token")


@repair("keys-unsaid", f"{API_SERVER}:log_non_default_args", until="0.33")
def install(module: ModuleType) -> None:
    """At start vLLM logs the values of --api-key and --hf-token."""
    expect_source(module.log_non_default_args, "isinstance(args, Namespace)")
    _hide_keys(module)


@repair("keys-unsaid", f"{API_SERVER}:log_non_default_args", releases=("0.23",), until="0.33")
def install_0_23(module: ModuleType) -> None:
    """At start vLLM logs the values of --api-key and --hf-token."""
    from vllm.entrypoints.serve.utils.api_utils import get_non_default_args

    expect_source(get_non_default_args, "isinstance(args, Namespace)")
    _hide_keys(module)


def _hide_keys(module: ModuleType) -> None:
    logs = module.log_non_default_args
    expect_parameters(logs, "args")
    expect_source(logs, 'logger.info("non-default args: %s", non_default_args)')

    @around(module, "log_non_default_args")
    def log_non_default_args(original: Callable[..., None], args: Any) -> None:
        if isinstance(args, argparse.Namespace):  # the server's; `LLM` has no key
            hidden = {name: "***" for name in SECRET if isinstance(getattr(args, name, None), str | list)}
            args = argparse.Namespace(**{**vars(args), **hidden})
        original(args)
