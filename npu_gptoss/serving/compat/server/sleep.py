"""/sleep of a server that was not started to sleep (vLLM 0.23)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import ASYNC


@repair("sleep", f"{ASYNC}:AsyncLLM.sleep", releases="0.23", until="vllm-ascend asks for the option before it pauses")
def install(module: ModuleType) -> None:
    """Without --enable-sleep-mode /sleep ends every request, fails on Ascend, and leaves the engine paused: what comes
    later waits for ever, and /health says 200."""
    expect_source(module.AsyncLLM.sleep, "await self.engine_core.sleep_async(level, mode)")

    @around(module.AsyncLLM, "sleep")
    async def sleep(original: Original, self: Any, level: int = 1, *more: Any, **named: Any) -> None:
        if level > 0 and not self.model_config.enable_sleep_mode:  # 0 only pauses
            raise ValueError("This server cannot sleep: it was started without --enable-sleep-mode.")
        await original(self, level, *more, **named)
