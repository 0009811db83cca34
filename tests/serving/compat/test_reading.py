"""The model's output: nothing that it writes may become an error, and each text must reach the field it belongs to."""

from __future__ import annotations

import pytest
from openai_harmony import HarmonyError, Role, StreamableParser, StreamState

from npu_gptoss.harmony.parser import Kind, TolerantParser, text_of
from npu_gptoss.serving.compat.turn import Turn
from tests.serving.compat.conftest import READING
from tests.serving.compat.fake_engine import (
    WEATHER,
    FakeEngine,
    chat,
    of_chat,
    respond,
    stream_chat,
    stream_responses,
    told,
)

pytestmark = pytest.mark.serving

ANSWER = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"


@pytest.fixture
def read(harmony, tokens):
    """The texts of each kind that a turn holds."""

    return lambda text: texts_of(Turn(TolerantParser(harmony, Role.ASSISTANT)).read(tokens(text)))


def texts_of(turn: Turn) -> dict[Kind, list[str]]:
    return {kind: [part.text for part in turn.parts if part.kind is kind] for kind in Kind}


def feed(parser: StreamableParser, tokens: list[int]) -> StreamableParser:
    for token in tokens:
        parser.process(token)
    return parser


# what a model writes when ignore_eos keeps it going
AFTER_THE_TURN = [
    "<|return|>",
    " and so on",
    "<|start|>assistant<|channel|>final<|message|>Once more.<|return|>",
    "<|start|>user<|message|>And 3 + 3?<|end|><|start|>assistant<|channel|>final<|message|>Six",
    "<|end|><|message|><|channel|><|call|>",
]


@pytest.mark.parametrize("rest", AFTER_THE_TURN)
def test_tokens_after_the_end_of_the_turn_change_nothing(everywhere, rest):
    assert everywhere(ANSWER + rest)[:3] == ("Four.", "hm", [])


def test_stock_vllm_fails_such_requests(patched, tokens):
    generated = tokens(ANSWER + "<|return|>")
    with patched():
        with pytest.raises(HarmonyError):  # the server answers 500
            chat(FakeEngine(generated), ignore_eos=True)
        assert "Unexpected token 200002" in told(stream_chat(FakeEngine(generated), ignore_eos=True))["error"]
        assert "Unexpected token 200002" in respond(FakeEngine(generated))["error"]["message"]
        with pytest.raises(HarmonyError):
            stream_responses(FakeEngine(generated))


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("<|channel|>final x y z<|message|>Four.<|return|>", Kind.ANSWER, "Four."),
        ("<|channel|>analysis–<|message|>hm", Kind.REASONING, "hm"),
        ("<|start|>assistant<|channel|>final<|message|>Four.<|return|>", Kind.ANSWER, "Four."),
        ("<|channel|>final<|start|>assistant<|channel|>analysis<|message|>hm", Kind.REASONING, "hm"),
    ],
)
def test_a_badly_spelled_first_header_is_read_as_far_as_possible(read, text, kind, expected):
    assert read(text)[kind] == [expected]


HM, FOUR = "<|channel|>analysis<|message|>hm<|end|>", "<|message|>Four.<|return|>"


@pytest.mark.parametrize(
    "rest",
    [
        "<|start|>assistant–commentary<|channel|>final x y z" + FOUR,
        "<|start|>robot<|channel|>final" + FOUR,
        "<|start|>assistant<|start|>assistant<|channel|>final" + FOUR,
        "<|start|>assistant<|channel|>final <|constrain|>json and more" + FOUR,
        # dropped, and what follows is not
        "<|start|>user foo bar baz<|message|>???<|end|><|start|>assistant<|channel|>final" + FOUR,
        "<|start|>user<|channel|>final x y z<|message|>???<|end|><|start|>assistant<|channel|>final" + FOUR,
        "noise<|start|>assistant<|channel|>final" + FOUR,
    ],
)
def test_a_badly_spelled_later_header_is_read_as_far_as_possible(harmony, read, tokens, rest):
    with pytest.raises(HarmonyError):
        feed(StreamableParser(harmony, Role.ASSISTANT), tokens(HM + rest))
    texts = read(HM + rest)
    assert (texts[Kind.REASONING], texts[Kind.ANSWER]) == (["hm"], ["Four."])


def test_a_message_whose_header_says_nothing_is_told_as_an_answer(read):
    texts = read(HM + "<|start|>nonsense 1 2 3<|message|>Four?<|end|><|start|>assistant<|channel|>final" + FOUR)
    assert texts[Kind.ANSWER] == ["Four?", "Four."]


def test_no_words_are_put_into_the_users_mouth_or_taken_from_it(read):
    texts = read("<|channel|>final<|message|>Four.<|end|><|start|>user<|message|>Thanks!<|end|>")
    assert texts[Kind.ANSWER] == ["Four."]


def test_well_formed_output_is_parsed_as_the_strict_parser_does(harmony, tokens):
    text = ANSWER.removesuffix("<|return|>") + (
        "<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>"
    )
    strict, tolerant = StreamableParser(harmony, Role.ASSISTANT), TolerantParser(harmony, Role.ASSISTANT)
    for token in tokens(text):
        strict.process(token)
        tolerant.process(token)
        assert tolerant.last_content_delta == strict.last_content_delta
        assert tolerant.current_content == strict.current_content
        assert tolerant.messages == strict.messages
        assert (tolerant.state is StreamState.EXPECT_START) == (strict.state is StreamState.EXPECT_START)
        if tolerant.in_content:
            assert tolerant.current_channel == strict.current_channel
            assert tolerant.current_recipient == strict.current_recipient


def test_a_turn_goes_on_after_a_tool_of_the_server(harmony, tokens):
    parser = TolerantParser(harmony, Role.ASSISTANT)
    feed(parser, tokens("<|channel|>commentary to=browser.search<|message|>{}<|call|>"))
    answer = tokens("<|start|>assistant<|channel|>final<|message|>Found.<|return|>")
    assert len(feed(parser, answer).messages) == 1
    parser.resume()
    assert text_of(feed(parser, answer).messages[-1]) == "Found."


# name: what the model writes after <|start|>assistant, and what both APIs tell of it
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
PARIS, NEXT = ["get_weather", '{"city": "Paris"}'], "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TURNS = {
    "answer": (ANSWER, ("Four.", "hm", [], "stop")),
    "answer without reasoning": (FINAL + "Four.<|return|>", ("Four.", None, [], "stop")),
    "empty answer": (FINAL + "<|return|>", ("", None, [], "stop")),
    "several of each": (
        f"<|channel|>analysis<|message|>one{NEXT}<|channel|>analysis<|message|>two{NEXT}"
        f"<|channel|>commentary<|message|>First.{NEXT}{FINAL}Second.<|return|>",
        ("First.\nSecond.", "one\ntwo", [], "stop"),
    ),
    "call": (CALL, (None, None, [PARIS], "tool_calls")),
    "preamble and call": (PREAMBLE + CALL, ("Let me look.", None, [PARIS], "tool_calls")),
    "call among the reasoning": (
        CALL.replace("commentary", "analysis").replace("<|constrain|>", ""),
        (None, None, [PARIS], "tool_calls"),
    ),
    "two calls": (CALL.replace("<|call|>", NEXT) + CALL, (None, None, [PARIS, PARIS], "tool_calls")),
    "no arguments": (CALL.replace(PARIS[1], ""), (None, None, [["get_weather", "{}"]], "tool_calls")),
    "call with a bad header": (CALL.replace("json<", "json now<"), (None, None, [PARIS], "tool_calls")),
    "call of nobody": ("<|channel|>commentary to=nobody<|message|>{}<|call|>", (None, "{}", [], "stop")),
    "no channel": ("<|message|>Four.<|return|>", ("Four.", None, [], "stop")),
    "no such channel": ("<|channel|>nonsense<|message|>Four.<|return|>", ("Four.", None, [], "stop")),
    "cut in the answer": (ANSWER.removesuffix(".<|return|>"), ("Four", "hm", [], "length")),
    "cut in the reasoning": ("<|channel|>analysis<|message|>h", (None, "h", [], "length")),
    "cut in the preamble": ("<|channel|>commentary<|message|>Let me", ("Let me", None, [], "length")),
    "cut in a call": (CALL[:-12], (None, None, [["get_weather", '{"city": "Par']], "length")),
    "cut in a header": (ANSWER[: ANSWER.index("al<")], (None, "hm", [], "length")),
    "no message": ("no message at all", (None, None, [], "length")),
    "nothing": ("<|return|>", (None, None, [], "stop")),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_told_alike_at_every_entrance(everywhere, name):
    text, expected = TURNS[name]
    assert everywhere(text) == expected


def test_stock_vllm_takes_answers_for_reasoning_and_loses_them(patched, tokens):
    def message_of(text: str, **fields) -> tuple:
        content, reasoning, _, _ = of_chat(chat(FakeEngine(tokens(text)), **fields))
        return reasoning, content

    with patched():
        assert message_of(TURNS["answer without reasoning"][0]) == ("Four.", "Four.")
        assert message_of(TURNS["answer without reasoning"][0], tool_flags=False) == ("Four.", "")
        assert message_of(TURNS["cut in the answer"][0]) == ("hm", None)  # with the tool parser the text is gone
        with pytest.raises(HarmonyError):
            message_of(TURNS["call with a bad header"][0], tools=[WEATHER])
    with patched(*READING):
        for name in ("answer without reasoning", "empty answer", "cut in the answer", "cut in the reasoning"):
            text, (content, reasoning, *_) = TURNS[name]
            assert message_of(text, tool_flags=False) == (reasoning, content)
        assert message_of(ANSWER, include_reasoning=False) == (None, "Four.")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("preamble and call", ["message", "function_call"]),
        ("cut in the preamble", ["message"]),
        ("no channel", ["message"]),
        ("no such channel", ["message"]),
        ("call of nobody", ["reasoning"]),
        ("cut in a call", []),
        ("no message", []),
    ],
)
def test_every_output_makes_a_response_by_vllms_own_items(patched, tokens, name, kinds):
    """Which a server with tools of its own has."""
    engine = FakeEngine(tokens(TURNS[name][0]))
    if name == "preamble and call":
        with patched():
            assert "Unknown recipient: None" in respond(engine)["error"]["message"]
    with patched(*READING):
        assert [item["type"] for item in respond(engine)["output"]] == kinds
