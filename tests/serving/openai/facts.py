"""Prints as JSON the fields and options that a vLLM's handlers read; run in the environment of its release.

fields: of each request class. options: the parameters of each handler's constructor, for the options of `vllm serve`.
headers: headers that the release's own grammars let the model write.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

CHAT = ("vllm.entrypoints.openai.chat_completion.", "vllm.entrypoints.openai.")  # of later releases, and of 0.11
ANTHROPIC = "vllm.entrypoints.anthropic.protocol:"
REQUESTS = {
    "chat": (f"{CHAT[0]}protocol:ChatCompletionRequest", f"{CHAT[1]}protocol:ChatCompletionRequest"),
    "batch": (f"{CHAT[0]}protocol:BatchChatCompletionRequest",),
    "responses": ("vllm.entrypoints.openai.responses.protocol:ResponsesRequest", f"{CHAT[1]}protocol:ResponsesRequest"),
    "messages": (f"{ANTHROPIC}AnthropicMessagesRequest",),
    "count": (f"{ANTHROPIC}AnthropicCountTokensRequest",),
}
HANDLERS = {
    "chat": (f"{CHAT[0]}serving:OpenAIServingChat", f"{CHAT[1]}serving_chat:OpenAIServingChat"),
    "responses": (
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
        f"{CHAT[1]}serving_responses:OpenAIServingResponses",
    ),
    "messages": ("vllm.entrypoints.anthropic.serving:AnthropicServingMessages",),
    "renderer": (
        "vllm.renderers.online_renderer:OnlineRenderer",
        "vllm.entrypoints.serve.render.serving:OpenAIServingRender",
    ),
}


def found(places: tuple[str, ...]) -> Any:
    """The first of these classes that the release has."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:
            continue
    return None


def headers() -> list[str]:
    try:
        from vllm.parser import harmony
    except ImportError:
        return []
    answers = [harmony._FINAL_BEGIN.format(constrain=constrain) for constrain in (*harmony._JSON_CONSTRAINS, "")]
    calls = [
        begin.format(name="get_weather", channel=channel, constrain=constrain)
        for begin in harmony._FUNCTION_CALL_BEGINS
        for channel in harmony._TOOL_CALL_CHANNELS
        for constrain in harmony._JSON_CONSTRAINS
    ]
    return answers + calls


def main() -> None:
    requests = {api: cls for api, places in REQUESTS.items() if (cls := found(places)) is not None}
    handlers = {api: cls for api, places in HANDLERS.items() if (cls := found(places)) is not None}
    facts = {
        "fields": {api: sorted(cls.model_fields) for api, cls in requests.items()},
        "options": {api: list(inspect.signature(cls.__init__).parameters)[1:] for api, cls in handlers.items()},
        "headers": headers(),
    }
    print("\n" + json.dumps(facts))


if __name__ == "__main__":
    main()
