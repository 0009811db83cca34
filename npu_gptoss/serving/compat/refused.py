"""What OpenAI's clients send and vLLM 0.23 refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from openai_harmony import Message

from npu_gptoss.harmony.conversation import reasoning_effort
from npu_gptoss.serving.compat import responses, tools
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import HARMONY_UTILS, RESPONSES_SERVING


@repair("effort-words", f"{HARMONY_UTILS}:get_system_message", lines=("0.23",))
def install_effort_0_23(harmony_utils: ModuleType) -> None:
    """The reasoning effort `minimal`, which clients of newer models send, is refused."""
    expect_parameters(harmony_utils.get_system_message, "reasoning_effort")
    expect_source(harmony_utils.build_harmony_preamble, "reasoning_effort=reasoning_effort,")

    @around(harmony_utils, "get_system_message")
    def get_system_message(original: Callable[..., Message], *args: Any, **kwargs: Any) -> Message:
        if (word := kwargs.get("reasoning_effort")) is not None:
            kwargs["reasoning_effort"] = reasoning_effort(word)
        return original(*args, **kwargs)


@repair("tool-description", f"{HARMONY_UTILS}:create_tool_definition", lines=("0.23",), upstream="vllm PR 44686")
def install_definition_0_23(harmony_utils: ModuleType) -> None:
    """A tool without a description is refused with 400, although OpenAI's specification asks for none."""
    tools.install_definition(harmony_utils)


@repair("responses-nulls", f"{RESPONSES_SERVING}:OpenAIServingResponses.create_responses", lines=("0.23",))
def install_nulls_0_23(serving: ModuleType) -> None:
    """A request of /v1/responses with parallel_tool_calls, background or truncation null is not answered."""
    responses.install_nulls(serving)
