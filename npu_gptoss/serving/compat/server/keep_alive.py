"""How long an idle connection stays open: longer than clients and proxies keep theirs."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, repair
from npu_gptoss.serving.compat.targets import APP_ENTRY, LAUNCHER, LAUNCHER_0_33, SERVERS

KEEP_ALIVE = 75  # seconds


@repair(
    "keep-alive",
    f"{LAUNCHER}:serve_http",
    lines=("0.11", "0.23"),
    until="vLLM keeps an idle connection longer than its clients do",
)
def install_keep_alive(launcher: ModuleType) -> None:
    """A connection that was idle for 5 s is closed, at times under the request that a client is just sending on it:
    OpenAI's clients keep theirs for 5 s too, proxies for 60."""
    expect_parameters(launcher.serve_http, "app", "sock", "uvicorn_kwargs")
    around(launcher, "serve_http", copies=SERVERS)(_kept_alive)


@repair(
    "keep-alive",
    f"{LAUNCHER_0_33} {APP_ENTRY}:serve_http",
    lines=("0.33",),
    until="vLLM keeps an idle connection longer than its clients do",
)
def install_keep_alive_0_33(launcher: ModuleType) -> None:
    """A connection that was idle for 5 s is closed, at times under the request that a client is just sending on it."""
    expect_parameters(launcher.serve_http, "app", "sock", "uvicorn_kwargs")
    around(launcher, "serve_http", copies=(APP_ENTRY,))(_kept_alive)


async def _kept_alive(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    if "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" not in os.environ:
        kwargs["timeout_keep_alive"] = KEEP_ALIVE
    return await original(*args, **kwargs)
