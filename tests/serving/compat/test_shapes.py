"""The shapes of vLLM 0.33's answers that clients of line 0.11 know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")

from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError
from vllm.parser.harmony import HarmonyParser

from npu_gptoss.harmony.encoding import ContextError

pytestmark = pytest.mark.serving


def message() -> dict[str, Any]:
    made = OpenAIServingChat._create_chat_message(object(), role="assistant", content="7", reasoning="3 + 4")
    return ChatCompletionResponseChoice(index=0, message=made).model_dump()["message"]


def delta(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser

    monkeypatch.setattr(HarmonyParser, "reasoning_parser_cls", GptOssReasoningParser)
    library = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    parser = HarmonyParser(SimpleNamespace(get_vocab=dict, decode=lambda ids, **_: library.decode(ids)))
    tokens = library.encode("<|channel|>analysis<|message|>3 + 4", allowed_special="all")
    made = parser.parse_delta("", tokens, SimpleNamespace(include_reasoning=True), finished=False)
    assert isinstance(made, DeltaMessage)
    return ChatCompletionResponseStreamChoice(index=0, delta=made).model_dump(exclude_unset=True)["delta"]


def test_reasoning_has_both_of_its_names(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with patched("reasoning-name"):
        for told in (message(), delta(monkeypatch)):
            assert told["reasoning"] == told["reasoning_content"] == "3 + 4"
    with patched():
        assert "reasoning_content" not in message() | delta(monkeypatch), "stock"


@pytest.mark.parametrize(
    "said",
    [
        ValueError("Input length (2126) exceeds model's maximum context length (2048)."),
        VLLMValidationError(
            "This model's maximum context length is 2048 tokens. However, your prompt contains 2126 input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            parameter="input_tokens",
        ),
        ContextError(
            "This model's maximum context length is 2048 tokens. However, your request has 2126 input tokens."
        ),
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_clients_know_it(patched: Any, said: Exception) -> None:
    with patched("context-length"):
        refused = BaseServing.create_error_response(said)
        told = refused.model_dump()["error"]
        assert refused.error.code == 400, "the status"
        assert (told["code"], told["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert told["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
        assert "2126" in told["message"]
        assert BaseServing.create_error_response("another").model_dump()["error"]["code"] == 400
    with patched():
        assert BaseServing.create_error_response(said).model_dump()["error"]["code"] == 400, "stock"


def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs(
    patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npu_gptoss.serving.compat import keep_alive
    from npu_gptoss.serving.compat.patch import stock

    seen: list[float] = []

    async def serve(app: Any, sock: Any, **uvicorn_kwargs: Any) -> None:
        seen.append(uvicorn_kwargs["timeout_keep_alive"])

    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    asyncio.run(keep_alive._kept_alive(serve, None, None, timeout_keep_alive=5))
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9")
    asyncio.run(keep_alive._kept_alive(serve, None, None, timeout_keep_alive=9))
    assert seen == [75, 9]
    with patched("keep-alive"):
        assert entry.serve_http is not stock(entry.serve_http)
