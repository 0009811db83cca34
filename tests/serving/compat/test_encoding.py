"""Prompts of chats of vLLM 0.23 and 0.33: those of stock, in linear time and beside the event loop."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.parser", reason="needs vLLM 0.33")  # or 0.23

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from npu_gptoss.harmony.encoding import ContextError
from tests.serving.compat.of_line import LINE

if LINE == "0.23":
    from vllm.entrypoints.serve.render.serving import OpenAIServingRender as OnlineRenderer
else:
    from vllm.renderers.online_renderer import OnlineRenderer

pytestmark = pytest.mark.serving

TEXTS = ("What is 3 + 4?", "", "<|end|> is no token here", "\n\n  \t", "深度学习 é \U0001f600", '{"a": [1]}', "x" * 300)
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": WEATHER}}]


@pytest.fixture
def renderer(tokenizer_directory: Path, request: pytest.FixtureRequest) -> Any:
    """vLLM's, as far as a chat's prompt needs it."""
    if LINE == "0.23":
        request.getfixturevalue("harmony")  # its library has no vocabulary in it
    online = object.__new__(OnlineRenderer)
    config = SimpleNamespace(
        max_model_len=4096, tokenizer=str(tokenizer_directory), model=str(tokenizer_directory), revision=None
    )
    vars(online).update(
        model_config=config, use_harmony=True, parser=None, supports_browsing=False, supports_code_interpreter=False,
        tool_parser=None, reasoning_effort_map={}, exclude_tools_when_tool_choice_none=True,
        renderer=SimpleNamespace(tokenizer=None),
    )  # fmt: skip
    return online


def prompt(renderer: Any, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    request = ChatCompletionRequest(messages=messages, **fields)
    _, (made,) = asyncio.run(renderer.render_chat(request))
    return made["prompt_token_ids"]


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    messages = []
    if draw.random() < 0.5:
        messages.append({"role": draw.choice(["system", "developer"]), "content": draw.choice(TEXTS)})
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": draw.choice(TEXTS)})
        if draw.random() < 0.5:
            function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
            call = {"id": "a", "type": "function", "function": function}
            asked = {"role": "assistant", "content": None, "tool_calls": [call]}
            messages.append(asked | ({"reasoning": draw.choice(TEXTS)} if draw.random() < 0.5 else {}))
            messages.append({"role": "tool", "tool_call_id": "a", "content": draw.choice(TEXTS)})
        if draw.random() < 0.7:
            answer = {"role": "assistant", "content": draw.choice(TEXTS)}
            messages.append(answer | ({"reasoning": draw.choice(TEXTS)} if draw.random() < 0.5 else {}))
    return messages


# a tool's result, as oss-harmony 0.0.10 writes it, and as OpenAI's guide and template do
STOCK, GUIDE = "<|channel|>commentary to=assistant<|message|>", " to=assistant<|channel|>commentary<|message|>"


def test_prompts_are_those_of_stock_but_for_the_header_of_a_result(patched: Any, renderer: Any) -> None:
    """It is the one header that vLLM does not write back to what the model was trained on."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    draw, results = random.Random(0), 0
    for _ in range(200):
        messages, fields = conversation(draw), {"tools": TOOLS} if draw.random() < 0.5 else {}
        fields["reasoning_effort"] = draw.choice(["low", "medium", "high", None])
        with patched():
            stock = prompt(renderer, messages, **fields)
        with patched("harmony-encoding"):
            ours = prompt(renderer, messages, **fields)
        if any(message["role"] == "tool" for message in messages):
            results += 1
            told = get_encoding().decode(stock)
            if LINE == "0.23":
                assert ours == stock, messages
                continue
            assert told.count(STOCK) == sum(message["role"] == "tool" for message in messages)
            assert get_encoding().decode(ours) == told.replace(STOCK, GUIDE)
        else:
            assert ours == stock, messages
    assert 20 < results < 180


def test_a_run_of_one_character_takes_no_square_of_its_length(patched: Any, renderer: Any) -> None:
    def seconds(length: int) -> float:
        since = time.perf_counter()
        prompt(renderer, [{"role": "user", "content": "-" * length}])
        return time.perf_counter() - since

    with patched("harmony-encoding"):
        seconds(10)  # loads the tokenizer
        ours = seconds(48_000)
    with patched():
        assert seconds(48_000) > 5 * ours, "stock"


@pytest.mark.skipif(LINE != "0.33", reason="needs vLLM 0.33")
def test_conversations_of_one_request_are_encoded_as_chats_are(patched: Any, renderer: Any) -> None:
    """Their prompts are made past the renderer's own entrance: one took the square, and held everybody."""
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest

    async def known(_: Any) -> None:
        return None

    serving = SimpleNamespace(_check_model=known, _preflight=lambda: None, online_renderer=renderer)

    def rendered(length: int) -> tuple[list[int], float, int]:
        """The first prompt's tokens, the seconds that it took, and how often the loop went on meanwhile."""

        async def beats() -> tuple[Any, int]:
            request = BatchChatCompletionRequest(messages=[[{"role": "user", "content": "-" * length}]] * 2)
            made = OpenAIServingChatBatch.render_batch_chat_request(serving, request)
            done, count = asyncio.create_task(made), 0
            while not done.done():
                await asyncio.sleep(0.001)
                count += 1
            return done.result(), count

        since = time.perf_counter()
        (_, _, (first, _)), count = asyncio.run(beats())
        return first["prompt_token_ids"], time.perf_counter() - since, count

    with patched("harmony-encoding", "batch-encoding"):
        alone = prompt(renderer, [{"role": "user", "content": "-" * 24_000}])
        ours = rendered(24_000)
        assert ours[0] == alone
        assert ours[2] > 3
    for repairs in (("harmony-encoding",), ()):
        with patched(*repairs):
            _, seconds, count = rendered(24_000)
            assert seconds > 3 * ours[1], "stock"
            assert count <= 3, "stock"


@pytest.mark.skipif(LINE != "0.33", reason="needs vLLM 0.33")
def test_the_loop_goes_on_while_prompts_are_made_to_score(patched: Any) -> None:
    """A query is written once for each item before the prompt is cut to the context."""
    from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest, ServingGenerativeScoring

    async def beats() -> int:
        request = GenerativeScoringRequest(query=[1] * 1_000_000, items=[[2]] * 100, label_token_ids=[1])
        made = ServingGenerativeScoring._build_prompts(SimpleNamespace(), request, None, 4096)
        done, count = asyncio.create_task(made), 0
        while not done.done():
            await asyncio.sleep(0.001)
            count += 1
        assert done.result()[1] == [4095] * 100
        return count

    with patched("scoring-prompts"):
        assert asyncio.run(beats()) > 5
    with patched():
        assert asyncio.run(beats()) <= 3, "stock"


def test_the_loop_goes_on_while_a_long_prompt_is_encoded(patched: Any, renderer: Any) -> None:
    """/health waits for it else."""

    async def beats(length: int) -> list[float]:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "word " * length}])
        done, times = asyncio.create_task(renderer.render_chat(request)), [time.perf_counter()]
        while not done.done():
            await asyncio.sleep(0.001)
            times.append(time.perf_counter())
        return times

    with patched("harmony-encoding"):
        prompt(renderer, [{"role": "user", "content": "hi"}])
        assert len(asyncio.run(beats(80_000))) > 5
    with patched():
        assert len(asyncio.run(beats(80_000))) <= 3, "stock"


def test_a_text_that_no_context_can_hold_is_not_encoded(patched: Any, renderer: Any) -> None:
    with patched("harmony-encoding"), pytest.raises(ContextError, match="maximum context length is 4096 tokens"):
        prompt(renderer, [{"role": "user", "content": "-" * (129 * 4096)}])
