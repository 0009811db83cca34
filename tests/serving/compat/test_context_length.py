"""A prompt that does not fit is refused in the words and with the code by which clients know to shorten it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.renderer import CompletionRenderer, RenderConfig

from npu_gptoss.harmony.encoding import Encoder, text_tokenizer
from npu_gptoss.serving.compat import vocabulary
from tests.serving.compat import fake_engine
from tests.serving.compat.conftest import HERE
from tests.serving.compat.fake_engine import LIMIT, FakeEngine, ask_chat, ask_responses

pytestmark = pytest.mark.serving

PATCHES = ("context-length", "harmony-rendering", "chat-prompt", "responses-prompt", "effort-words", "harmony-parser")
LONG = "word " * 5000


@pytest.fixture
def fake(tokens) -> FakeEngine:
    return FakeEngine(tokens("<|channel|>final<|message|>Hi.<|return|>"))


async def ask(fake: FakeEngine, api: str, text: str, most: int | None = None, stream: bool = False) -> Any:
    """The answer's object, which the HTTP server dumps with the status `error.code`."""
    if api == "chat":
        messages = [{"role": "user", "content": text}]
        return await ask_chat(fake, messages=messages, max_completion_tokens=most, stream=stream)
    return await ask_responses(fake, input=text, max_output_tokens=most, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "param"), [("chat", "messages"), ("responses", "input")])
def test_a_long_conversation_is_refused_with_both_numbers(patched, fake, api, param, stream, caplog):
    with patched():
        assert "max_tokens must be at least 1" in asyncio.run(ask(fake, api, LONG, stream=stream)).error.message
    with patched(*PATCHES), caplog.at_level(logging.INFO):
        caplog.clear()
        refused = asyncio.run(ask(fake, api, LONG, stream=stream))
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
        refused = asyncio.run(ask(fake, api, "Hello", LIMIT)).error.message
        assert f"maximum context length is {LIMIT} tokens" in refused
        assert fake.prompts == []
        asyncio.run(ask(fake, api, "Hello", 100))
        assert len(fake.prompts) == 1


@pytest.mark.parametrize(
    ("api", "field"),
    [
        (ask_chat, lambda word: {"reasoning_effort": word}),
        (ask_responses, lambda word: {"reasoning": {"effort": word}}),
    ],
    ids=["chat", "responses"],
)
def test_minimal_effort_is_low_and_an_unknown_word_is_refused(patched, fake, harmony, api, field):
    with patched(*PATCHES):
        asyncio.run(api(fake, **field("minimal")))
        assert "Reasoning: low\n" in harmony.decode(fake.prompts[0])
        for word in ("none", "huge"):
            with pytest.raises(ValueError, match="medium"):  # FastAPI answers 400 with what it says
                asyncio.run(api(fake, **field(word)))


@pytest.mark.parametrize(
    ("text", "most", "numbers"),
    [(LONG, 16, ("5000",)), ("word " * 4090, 16, ("4106", "4090", "16")), (" " * (128 * LIMIT + 1), 16, ("4097",))],
)
def test_a_completion_is_refused_with_the_models_context_not_what_is_left_of_it(patched, text, most, numbers):
    async def tokenize(text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[1] * len(text.split()))

    renderer = CompletionRenderer(SimpleNamespace(max_model_len=LIMIT, encoder_config=None))
    renderer.async_tokenizer = tokenize
    config = RenderConfig(max_length=LIMIT - most)
    with patched(*PATCHES), pytest.raises(ValueError, match=f"maximum context length is {LIMIT} tokens") as refusal:
        asyncio.run(renderer.render_prompt(prompt_or_prompts=text, config=config))
    assert all(number in str(refusal.value) for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_other_requests_are_answered_while_a_long_prompt_is_encoded(
    patched, fake, monkeypatch, tokenizer_directory, api
):
    """The event loop must turn meanwhile, as /health needs it, and with every patch in: some copy the request."""
    text_tokenizer(tokenizer_directory)
    monkeypatch.setattr(vocabulary, "_served", [tokenizer_directory])
    monkeypatch.setattr(fake_engine, "LIMIT", 131_072)
    gaps: list[float] = []
    encoded = []
    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda *args: encoded.append(threading.get_ident()) or original(*args))

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    async def watched() -> None:
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.05)
        await ask(fake, api, "a word, and more " * 20_000)
        beating.cancel()

    with patched(*(patch.name for patch in HERE if patch.name != "harmony-vocabulary")):
        asyncio.run(watched())
    assert len(fake.prompts[0]) > 80_000
    assert len(encoded) == 1, "the prompt was encoded again where vLLM asks for it"
    assert encoded[0] != threading.get_ident()
    assert max(gaps) < 0.5, f"the loop stood still for {max(gaps):.2f} s"
