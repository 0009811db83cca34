"""A prompt that does not fit is refused in the words and with the code by which clients know to shorten it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from tests.serving.compat import fake_engine
from tests.serving.compat.fake_engine import FakeEngine

pytestmark = pytest.mark.serving

PATCHES = ("context-length", "harmony-rendering", "chat-prompt", "responses-prompt", "effort-words", "harmony-parser")
LIMIT = 4096  # of the fake server
LONG = "word " * 5000


@pytest.fixture
def fake(harmony) -> FakeEngine:
    return FakeEngine(harmony.encode("<|channel|>final<|message|>Hi.<|return|>", allowed_special="all"))


def ask(fake: FakeEngine, api: str, text: str, most: int | None, stream: bool) -> Any:
    """The answer's object, which the HTTP server dumps with the status `error.code`."""
    from vllm.entrypoints.openai import protocol

    async def answered() -> Any:
        if api == "chat":
            fields = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": most}
            request = protocol.ChatCompletionRequest.model_validate({"model": "gpt-oss", "stream": stream} | fields)
            return await fake_engine.chat_serving(fake).create_chat_completion(request)
        fields = {"input": text, "max_output_tokens": most}
        request = protocol.ResponsesRequest.model_validate({"model": "gpt-oss", "stream": stream} | fields)
        return await fake_engine.responses_serving(fake).create_responses(request)

    return asyncio.run(answered())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "param"), [("chat", "messages"), ("responses", "input")])
def test_a_long_conversation_is_refused_with_both_numbers(patched, fake, api, param, stream, caplog):
    with patched():
        assert "max_tokens must be at least 1" in ask(fake, api, LONG, None, stream).error.message
    with patched(*PATCHES), caplog.at_level(logging.INFO):
        caplog.clear()
        refused = ask(fake, api, LONG, None, stream)
    assert refused.error.code == 400
    shown = refused.model_dump()["error"]
    assert shown["message"].startswith(f"This model's maximum context length is {LIMIT} tokens. However, ")
    assert "50" in shown["message"]  # 5 000 words and the frame
    assert (shown["code"], shown["param"], shown["type"]) == ("context_length_exceeded", param, "invalid_request_error")
    assert not any(record.exc_info for record in caplog.records), "a client's mistake is no traceback"
    assert fake.prompts == []


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_prompt_and_its_completion_have_to_fit_together(patched, fake, api):
    with patched(*PATCHES):
        refused = ask(fake, api, "Hello", LIMIT, False)
        assert "context length" in refused.error.message
        assert str(LIMIT) in refused.error.message
        assert fake.prompts == []
        assert not hasattr(ask(fake, api, "Hello", 100, False), "error") or fake.prompts


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_minimal_effort_is_low_and_an_unknown_word_is_refused(patched, fake, harmony, api):
    from vllm.entrypoints.openai import protocol

    async def answered(word: str) -> Any:
        if api == "chat":
            fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": word}
            request = protocol.ChatCompletionRequest.model_validate({"model": "gpt-oss"} | fields)
            return await fake_engine.chat_serving(fake).create_chat_completion(request)
        request = protocol.ResponsesRequest.model_validate(
            {"model": "gpt-oss", "input": "Hi", "reasoning": {"effort": word}}
        )
        return await fake_engine.responses_serving(fake).create_responses(request)

    with patched(*PATCHES):
        asyncio.run(answered("minimal"))
        assert "Reasoning: low\n" in harmony.decode(fake.prompts[0])
        for word in ("none", "huge"):
            with pytest.raises(ValueError, match="medium"):  # FastAPI answers 400 with what it says
                asyncio.run(answered(word))


class Renderer:
    """What vLLM's completion renderer needs of its surroundings."""

    def __new__(cls) -> Any:
        from types import SimpleNamespace

        from vllm.entrypoints.renderer import CompletionRenderer

        made = CompletionRenderer(SimpleNamespace(max_model_len=LIMIT, encoder_config=None))

        async def tokenize(text: str, **_: Any) -> Any:
            return SimpleNamespace(input_ids=[1] * len(text.split()))

        made.async_tokenizer = tokenize
        return made


@pytest.mark.parametrize(
    ("text", "most", "numbers"),
    [(LONG, 16, ("5000",)), ("word " * 4090, 16, ("4106", "4090", "16")), (" " * (128 * LIMIT + 1), 16, ("4097",))],
)
def test_a_completion_is_refused_with_the_models_context_not_what_is_left_of_it(patched, text, most, numbers):
    from vllm.entrypoints.renderer import RenderConfig

    def render() -> Any:
        config = RenderConfig(max_length=LIMIT - most)
        return asyncio.run(Renderer().render_prompt(prompt_or_prompts=text, config=config))

    with patched(*PATCHES), pytest.raises(ValueError, match=f"maximum context length is {LIMIT} tokens") as refusal:
        render()
    assert all(number in str(refusal.value) for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_other_requests_are_answered_while_a_long_prompt_is_encoded(patched, fake, monkeypatch, tmp_path, api):
    """The event loop must turn meanwhile, as /health needs it, and with every patch in: some copy the request."""
    from npu_gptoss.harmony.encoding import Encoder, text_tokenizer
    from npu_gptoss.serving.compat import vocabulary
    from npu_gptoss.tiny.tokenizer_files import write_tokenizer_files
    from tests.serving.compat.conftest import HERE

    write_tokenizer_files(tmp_path)
    text_tokenizer(tmp_path)
    monkeypatch.setattr(vocabulary, "_served", [tmp_path])
    gaps: list[float] = []
    encoded = []
    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.append(threading.get_ident()) or original(*args))

    async def watched() -> None:
        from vllm.entrypoints.openai import protocol

        async def beat() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        text = "a word, and more " * 20_000
        if api == "chat":
            serving = fake_engine.chat_serving(fake)
            fields = {"model": "gpt-oss", "messages": [{"role": "user", "content": text}]}
            asked = serving.create_chat_completion(protocol.ChatCompletionRequest.model_validate(fields))
        else:
            serving = fake_engine.responses_serving(fake)
            asked = serving.create_responses(
                protocol.ResponsesRequest.model_validate({"model": "gpt-oss", "input": text})
            )
        monkeypatch.setattr(serving, "max_model_len", 131_072)
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.05)
        await asked
        beating.cancel()

    with patched(*(patch.name for patch in HERE if patch.name != "harmony-vocabulary")):
        asyncio.run(watched())
    assert len(fake.prompts[0]) > 80_000
    assert len(encoded) == 1, "the prompt was encoded again where vLLM asks for it"
    assert encoded[0] != threading.get_ident()
    assert max(gaps) < 0.5, f"the loop stood still for {max(gaps):.2f} s"
