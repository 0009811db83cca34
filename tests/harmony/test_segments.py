"""vLLM 0.33's reading of the model's output with the repair `harmony-segments`, whole and streamed; needs no GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")

from vllm.parser import harmony as parsing

from npu_gptoss.serving.compat import segments
from tests.harmony.test_parser import Written, noisy, spoiled, tokens_of, well_formed

STREAMS = 5_000  # of each of two kinds


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    segment, rule = parsing._SegmentType, "from_channel_and_recipient"
    parser, before = parsing.get_streamable_parser_for_assistant, vars(segment)[rule]
    segments.install_segments(parsing)
    try:
        yield
    finally:
        parsing.get_streamable_parser_for_assistant = parser
        setattr(segment, rule, before)


class Served:
    """What a client is told of a turn by vLLM's parser."""

    def __init__(self, library: Any) -> None:
        tokenizer = SimpleNamespace(get_vocab=dict, decode=lambda ids, **_: library.decode(ids))
        self.parser = parsing.HarmonyParser(tokenizer)
        self.request = SimpleNamespace(include_reasoning=True)

    def whole(self, tokens: Sequence[int]) -> dict[str, Any]:
        reasoning, content, calls = self.parser.parse("", self.request, model_output_token_ids=tokens)
        return {
            "reasoning": reasoning or "",
            "content": content or "",
            "calls": [(call.name, call.arguments) for call in calls or ()],
        }

    def streamed(self, tokens: Sequence[int], draw: random.Random) -> dict[str, Any]:
        told: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
        rest = list(tokens)
        while rest:
            count = draw.randrange(1, 5)
            part, rest = rest[:count], rest[count:]
            delta = self.parser.parse_delta("", part, self.request, finished=not rest)
            for call in delta.tool_calls or () if delta else ():
                if call.function.name:
                    told["calls"].append([call.function.name, ""])
                told["calls"][-1][1] += call.function.arguments or ""
            told["reasoning"] += (delta and delta.reasoning) or ""
            told["content"] += (delta and delta.content) or ""
        return told | {"calls": [tuple(call) for call in told["calls"]]}


@pytest.fixture(autouse=True)
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM sets them when it starts with gpt-oss."""
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    monkeypatch.setattr(parsing.HarmonyParser, "reasoning_parser_cls", GptOssReasoningParser)
    monkeypatch.setattr(parsing.HarmonyParser, "tool_parser_cls", GptOssToolParser)


def lost(messages: list[Written], told: dict[str, Any]) -> list[str]:
    """The texts that are nowhere. Arguments of a call that is told whole are spelled anew."""
    text = "\n".join((told["reasoning"], told["content"], *(arguments for _, arguments in told["calls"])))
    anew = (json.dumps(json.loads(m.text)) if m.text.startswith("{") else m.text for m in messages)
    return [m.text for m, other in zip(messages, anew, strict=True) if m.text not in text and other not in text]


def test_no_text_is_lost_however_its_header_is_spelled(library):
    draw = random.Random(0)
    with repaired():
        for _ in range(STREAMS):
            messages = well_formed(draw)
            pieces = spoiled(messages, draw)
            tokens = tokens_of(library, pieces)
            for told in (Served(library).whole(tokens), Served(library).streamed(tokens, draw)):
                assert not lost(messages, told), f"{pieces} is told as {told}"


def test_the_strict_parser_loses_text_without_a_word(library):
    """Else the repair is needed no more."""
    draw, losses = random.Random(0), 0
    for _ in range(200):
        messages = well_formed(draw)
        losses += bool(lost(messages, Served(library).whole(tokens_of(library, spoiled(messages, draw)))))
    assert losses > 50


def test_any_tokens_at_all_are_told_without_an_exception(library):
    draw = random.Random(1)
    with repaired():
        for _ in range(STREAMS):
            tokens = noisy(library, draw)
            Served(library).whole(tokens)
            Served(library).streamed(tokens, draw)


def test_what_is_well_formed_is_told_byte_for_byte_as_by_stock_vllm(library):
    draw = random.Random(2)
    for _ in range(500):
        tokens = tokens_of(library, (piece for message in well_formed(draw) for piece in message.pieces))
        seed = draw.random()

        def told(tokens: list[int] = tokens, seed: float = seed) -> list[dict[str, Any]]:
            served = Served(library)
            counted = served.parser.count_reasoning_tokens(tokens)
            return [served.whole(tokens), Served(library).streamed(tokens, random.Random(seed)), {"counted": counted}]

        want = told()
        with repaired():
            assert told() == want


@pytest.mark.parametrize("constrain", parsing._JSON_CONSTRAINS)
def test_a_structured_answer_is_content_however_vllms_own_grammar_lets_its_header_be(library, constrain):
    tokens = tokens_of(library, (parsing._FINAL_BEGIN.format(constrain=constrain), '{"a": 1}', "<|return|>"))
    want = {"reasoning": "", "content": '{"a": 1}', "calls": []}
    stock = Served(library).whole(tokens)
    assert stock == want if "constrain" in constrain else stock["calls"] == [("json", '{"a": 1}')]  # why it is repaired
    with repaired():
        assert Served(library).whole(tokens) == Served(library).streamed(tokens, random.Random(0)) == want


def test_calls_are_calls_however_vllms_own_grammar_lets_their_header_be(library):
    parts = parsing._FUNCTION_CALL_BEGINS, parsing._TOOL_CALL_CHANNELS, parsing._JSON_CONSTRAINS
    with repaired():
        for begin, channel, constrain in itertools.product(*parts):
            header = begin.format(name="f", channel=channel, constrain=constrain)
            told = Served(library).whole(tokens_of(library, (header, '{"a": 1}', "<|call|>")))
            assert told == {"reasoning": "", "content": "", "calls": [("f", '{"a": 1}')]}, header


def test_what_goes_to_a_tool_of_the_server_is_not_told_as_text(library):
    """/v1/responses tells it by events of its own."""
    tokens = tokens_of(library, ("<|channel|>commentary to=python<|message|>", "1 + 1", "<|call|>"))
    with repaired():
        assert Served(library).whole(tokens) == {"reasoning": "", "content": "", "calls": []}
