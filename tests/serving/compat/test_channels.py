"""vLLM 0.23's reading of a turn, whole and streamed, by its own serving object over an engine of given tokens."""

from __future__ import annotations

import asyncio
import json
import random
import types
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.chat_completion.stream_harmony", reason="needs vLLM 0.23")

from openai_harmony import HarmonyError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.harmony.test_parser import noisy, spoiled, well_formed

pytestmark = pytest.mark.serving

READING = ("harmony-parser", "harmony-channels", "tool-answers", "chat-stream-channels", "reasoning-name")
ENDS = (200002, 200012)  # <|return|>, <|call|>
STREAMS = 100
HM, NEXT = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant"
FOUR = NEXT + "<|channel|>final<|message|>Four.<|return|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
PARIS = ["get_weather", '{"city":"Paris"}']
TWO_CALLS = CALL.replace("<|call|>", "<|end|>") + NEXT + CALL


class Engine:
    """Generates these tokens, `bite` an output."""

    errored = False
    vllm_config = input_processor = None
    renderer = types.SimpleNamespace(tokenizer=object())
    model_config = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(model_type="gpt_oss"),
        hf_text_config=types.SimpleNamespace(model_type="gpt_oss"),
        model="gpt-oss",
        generation_config="auto",
        get_diff_sampling_param=dict,
    )

    def __init__(self, tokens: Sequence[int], bite: int, finish: str | None = None) -> None:
        self.tokens, self.bite, self.finish = list(tokens), bite, finish

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        for first in range(0, len(self.tokens), self.bite):
            part = self.tokens[first : first + self.bite]
            last = first + self.bite >= len(self.tokens)
            reason = (self.finish or ("stop" if part[-1] in ENDS else "length")) if last else None
            done = CompletionOutput(0, "", part, None, None, finish_reason=reason)
            yield RequestOutput("id", None, [1], None, [done], last, num_cached_tokens=0)
            await asyncio.sleep(0)


def asked(
    tokens: Sequence[int], bite: int | None = None, tool_flags: bool = True, finish: str | None = None, **fields: Any
) -> dict[str, Any]:
    """What the client has of a turn in the end; `bite`: of the stream, None where the answer is whole."""
    flags = {"enable_auto_tools": True, "tool_parser": "openai"} if tool_flags else {}
    serving = OpenAIServingChat(
        Engine(tokens, bite or len(tokens), finish), None, "assistant", openai_serving_render=None, request_logger=None,
        chat_template=None, chat_template_content_format="auto", **flags,
    )  # fmt: skip
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], stream=bite is not None, **fields)
    params = SamplingParams(output_kind=RequestOutputKind.DELTA if bite else RequestOutputKind.FINAL_ONLY)
    generated = serving.engine_client.generate({}, params, "id")
    names = RequestResponseMetadata(request_id="id")
    how = (request, generated, "id", "gpt-oss", [], serving.renderer.tokenizer, names)
    if bite is None:
        (choice,) = asyncio.run(serving.chat_completion_full_generator(*how)).model_dump()["choices"]
        chunks = [{"choices": [{"delta": choice["message"], "finish_reason": choice["finish_reason"]}]}]
    else:
        chunks = asyncio.run(read(serving.chat_completion_stream_generator(*how)))
    told: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        (choice,) = chunk["choices"]
        delta, told["finish"] = choice["delta"], choice["finish_reason"]
        for name in ("content", "reasoning"):
            told[name] += delta.get(name) or ""
        told["named twice"] = delta.get("reasoning_content") == delta.get("reasoning")
        for number, call in enumerate(delta.get("tool_calls") or ()):
            if call.get("index", number) == len(told["calls"]):
                told["calls"].append([call["function"]["name"], ""])
            told["calls"][call.get("index", number)][1] += call["function"].get("arguments") or ""
    return told


async def read(stream: AsyncIterator[str]) -> list[dict[str, Any]]:
    lines = [line async for line in stream]
    assert lines[-1] == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def everywhere(tokens: Sequence[int], bites: Sequence[int] = (1, 3, 100), **fields: Any) -> tuple:
    """The same of a whole answer and of streams in bites."""
    whole = asked(tokens, **fields)
    for bite in bites:
        assert asked(tokens, bite, **fields) == whole
    assert whole["named twice"]
    return whole["content"], whole["reasoning"], whole["calls"], whole["finish"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HM + FOUR, ("Four.", "hm", [], "stop")),
        (HM + FOUR + "<|return|> and so on", ("Four.", "hm", [], "length")),  # ignore_eos: every load test
        ("<|channel|>final x y z<|message|>Four.<|return|>", ("Four.", "", [], "stop")),
        ("<|channel|>nonsense<|message|>Four.<|return|>", ("Four.", "", [], "stop")),
        ("<|message|>Four.<|return|>", ("Four.", "", [], "stop")),
        (HM + NEXT + HM + FOUR, ("Four.", "hm\nhm", [], "stop")),
        ("<|channel|>commentary<|message|>I look.<|end|>" + FOUR, ("I look.\nFour.", "", [], "stop")),
        (CALL, ("", "", [PARIS], "tool_calls")),
        (TWO_CALLS, ("", "", [PARIS, PARIS], "tool_calls")),
        (CALL.replace("functions.", ""), ("", "", [PARIS], "tool_calls")),
        (CALL.replace('{"city":"Paris"}', ""), ("", "", [["get_weather", "{}"]], "tool_calls")),
        *(
            (f"<|channel|>{channel} to={tool}<|message|>1+1<|call|>", ("", "1+1", [], "stop"))
            for channel in ("commentary", "analysis")
            for tool in ("python", "browser.search")  # built-in ones, which are not there
        ),
        (f"<|channel|>commentary to=python<|message|>1+1<|end|>{FOUR}", ("Four.", "1+1", [], "stop")),
        ("<|channel|>commentary to=python<|message|>1+", ("", "1+", [], "length")),
        ("<|channel|>analysis<|message|>h", ("", "h", [], "length")),
        (HM + NEXT + "<|channel|>final<|message|>Fou", ("Fou", "hm", [], "length")),
    ],
)
def test_a_turn_is_told_alike_whole_and_streamed(patched: Any, tokens: Callable, text: str, expected: tuple) -> None:
    with patched(*READING):
        assert everywhere(tokens(text)) == expected


def test_a_whole_answer_keeps_what_a_built_in_tool_was_told(patched: Any, tokens: Callable) -> None:
    told = tokens("<|channel|>commentary to=python<|message|>1+1<|call|>")
    with patched(*(name for name in READING if name != "harmony-channels")):
        assert (asked(told)["reasoning"], asked(told, 1)["reasoning"]) == ("", "1+1"), "stock"
    with patched(*READING):
        assert (asked(told)["reasoning"], asked(told, 1)["reasoning"]) == ("1+1", "1+1")


def test_a_call_that_is_cut_off_is_none_to_run(patched: Any, tokens: Callable) -> None:
    cut = tokens(CALL[: CALL.index("ris")])
    with patched(*READING):
        assert asked(cut, 1)["finish"] == asked(cut)["finish"] == "length"
    with patched():
        assert asked(cut, 1)["finish"] == "tool_calls", "stock"


def final(text: str) -> str:
    return f"{NEXT}<|channel|>final <|constrain|>json<|message|>{text}<|return|>"


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
LIST = '[{"name": "get_weather", "parameters": {"city":"Paris"}}]'


@pytest.mark.parametrize(
    ("text", "choice", "expected", "stock_too"),
    [
        (HM + final(LIST), "required", ("", "hm", [PARIS], "tool_calls"), False),
        (HM + final('{"city":"Paris"}'), NAMED, ("", "hm", [PARIS], "tool_calls"), False),
        (HM + NEXT + CALL, NAMED, ("", "hm", [PARIS], "tool_calls"), True),  # by itself
        (final(LIST[:9]), "required", (LIST[:9], "", [], "stop"), True),  # no call: as written
        (final(LIST), "auto", (LIST, "", [], "stop"), True),
        (HM + NEXT + CALL, "none", (PARIS[1], "hm", [], "stop"), False),
    ],
)
def test_a_choice_of_tools_is_told_as_what_it_asks_for(
    patched: Any, tokens: Callable, text: str, choice: Any, expected: tuple, stock_too: bool
) -> None:
    how = {"tools": [WEATHER], "tool_choice": choice}
    with patched(*READING):
        assert everywhere(tokens(text), **how) == expected
    with patched("harmony-parser"):
        told = asked(tokens(text), 1, **how)
        assert ((told["content"], told["reasoning"], told["calls"], told["finish"]) == expected) == stock_too


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("One, two, three.", {"stop": "two"}, "One, "),
        ("One, two, three.", {"stop": ["o, three", "two,"]}, "One, "),
        ("One, two, tw", {"stop": "two, two"}, "One, two, tw"),
        ("One, two.", {"stop": "two", "include_stop_str_in_output": True}, "One, two"),
        ("One", {"stop": ["hm", "final", "assistant"]}, "One"),  # in reasoning and headers alone
        ("One, two.", {"stop": "two", "min_tokens": 100}, "One, two."),
    ],
)
def test_a_stop_string_is_not_in_the_answer_and_ends_it(
    patched: Any, tokens: Callable, text: str, fields: dict[str, Any], expected: str
) -> None:
    turn = tokens(f"{HM}{NEXT}<|channel|>final<|message|>{text}")
    with patched(*READING):
        assert everywhere(turn, finish="stop", **fields) == (expected, "hm", [], "stop")
    with patched("harmony-parser", "reasoning-name"):
        assert asked(turn, finish="stop", **fields)["content"] == text, "stock"


def test_one_call_is_told_where_no_more_are_wanted(patched: Any, tokens: Callable) -> None:
    with patched(*READING):
        assert everywhere(tokens(TWO_CALLS), parallel_tool_calls=False)[2] == [PARIS]


def test_a_generator_that_another_package_puts_into_the_class_does_not_take_ours_away(
    patched: Any, tokens: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend does, after a plugin's repairs."""
    with patched(*READING):
        monkeypatch.setattr(OpenAIServingChat, "chat_completion_stream_generator", None)
        assert asked(tokens(HM + FOUR), 1)["content"] == "Four."


def test_stock_fails_or_loses_each_of_these(patched: Any, tokens: Callable) -> None:
    """Else a repair is needed no more."""
    with patched():
        with pytest.raises(HarmonyError):  # status 500
            asked(tokens(HM + FOUR + "<|return|>"))
        with pytest.raises(AssertionError, match="Unexpected token"):
            asked(tokens(HM + FOUR + "<|return|>"), 1)
        assert asked(tokens("<|channel|>nonsense<|message|>Four.<|return|>"))["content"] == ""
        assert asked(tokens("<|channel|>commentary<|message|>I look.<|end|>" + FOUR))["content"] == "Four."
        assert asked(tokens(CALL))["calls"] != [PARIS], "arguments written anew"
        with pytest.raises(IndexError):  # the second call is taken for the first, which is told as number two
            asked(tokens(TWO_CALLS), 100)
        assert asked(tokens(HM + NEXT + HM + FOUR), 1)["reasoning"] == "hmhm"
        assert not asked(tokens(HM + FOUR))["named twice"]


def test_tools_are_called_without_the_flags_too(patched: Any, tokens: Callable) -> None:
    with patched(*READING, "tools-without-flags"):
        assert asked(tokens(CALL), tool_flags=False)["calls"] == [PARIS]
    with patched(*READING):
        assert asked(tokens(CALL), tool_flags=False)["calls"] == [], "stock"


def test_no_text_is_lost_however_its_header_is_spelled(patched: Any, tokens: Callable) -> None:
    draw = random.Random(0)
    with patched(*READING):
        for _ in range(STREAMS):
            messages = well_formed(draw)
            pieces = spoiled(messages, draw)
            for bite in (None, draw.randrange(1, 6)):
                told = asked(tokens("".join(pieces)), bite)
                text = "\n".join((told["content"], told["reasoning"], *(arguments for _, arguments in told["calls"])))
                assert not [message.text for message in messages if message.text not in text], f"{bite} {told} {pieces}"


def test_any_tokens_at_all_are_told_without_an_exception(patched: Any, harmony: Any) -> None:
    draw = random.Random(1)
    with patched(*READING):
        for _ in range(STREAMS):
            made = noisy(harmony, draw)
            if made:
                assert asked(made, draw.randrange(1, 6)) is not None
                asked(made)
