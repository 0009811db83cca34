"""The model's output: nothing that it writes may become an error, and each text must reach the field it belongs to."""

from __future__ import annotations

import pytest
from openai_harmony import HarmonyError, Role, StreamableParser, StreamState

from npu_gptoss.harmony.parser import Kind, TolerantParser, kind_of, text_of
from npu_gptoss.serving.compat.turn import Turn
from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, respond, stream_chat, stream_responses, told

pytestmark = pytest.mark.serving

PARSER = ("harmony-parser",)
READING = ("harmony-parser", "harmony-channels", "tool-answers")
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
def test_tokens_after_the_end_of_the_turn_change_nothing(patched, tokens, rest):
    generated = tokens(ANSWER + rest)
    with patched(*READING, "chat-stream-tokens", "chat-stream-channels", "responses-stream-tokens"):
        message = chat(FakeEngine(generated), ignore_eos=True)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Four.", "hm")
        for bite in (1, 4):
            answer = told(stream_chat(FakeEngine(generated, bite), ignore_eos=True))
            assert (answer["content"], answer["reasoning"], answer["error"]) == ("Four.", "hm", None)
        assert [item["type"] for item in respond(FakeEngine(generated))["output"]] == ["reasoning", "message"]
        events = [event.type for event in stream_responses(FakeEngine(generated))]
        assert events.count("response.output_item.done") == 2
        assert events[-1] == "response.completed"


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
        ("<|message|>Four.<|return|>", Kind.ANSWER, "Four."),
    ],
)
def test_a_badly_spelled_first_header_is_read_as_far_as_possible(read, text, kind, expected):
    assert read(text)[kind] == [expected]


@pytest.mark.parametrize(
    "header",
    [
        "assistant–commentary<|channel|>final x y z",
        "robot<|channel|>final",
        "assistant<|start|>assistant<|channel|>final",
        "assistant<|channel|>final <|constrain|>json and more",
    ],
)
def test_a_badly_spelled_later_header_is_read_as_far_as_possible(harmony, read, tokens, header):
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>{header}<|message|>Four.<|return|>"
    with pytest.raises(HarmonyError):
        feed(StreamableParser(harmony, Role.ASSISTANT), tokens(text))
    texts = read(text)
    assert (texts[Kind.REASONING], texts[Kind.ANSWER]) == (["hm"], ["Four."])


def test_a_call_with_a_badly_spelled_header_is_still_a_call(patched, tokens):
    header = "<|channel|>commentary to=functions.get_weather <|constrain|>json now"
    generated = tokens(header + '<|message|>{"city": 1}<|call|>')
    with patched(), pytest.raises(HarmonyError):
        chat(FakeEngine(generated), tools=[WEATHER])
    with patched(*READING):
        (call,) = chat(FakeEngine(generated), tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("get_weather", '{"city": 1}')


@pytest.mark.parametrize("header", ["user foo bar baz", "nonsense 1 2 3", "user<|channel|>final x y z"])
def test_what_cannot_be_read_is_dropped_and_what_follows_is_not(read, header):
    texts = read(
        f"<|channel|>analysis<|message|>hm<|end|><|start|>{header}<|message|>???<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert (texts[Kind.REASONING], texts[Kind.ANSWER]) == (["hm"], ["Four."])


def test_text_between_messages_belongs_to_none(read):
    texts = read(
        "<|channel|>analysis<|message|>hm<|end|>noise<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert (texts[Kind.REASONING], texts[Kind.ANSWER]) == (["hm"], ["Four."])


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


@pytest.mark.parametrize(
    ("role", "channel", "recipient", "kind"),
    [
        ("assistant", "final", None, Kind.ANSWER),
        ("assistant", "analysis", None, Kind.REASONING),
        ("assistant", "commentary", "functions.f", Kind.CALL),
        ("assistant", "analysis", "functions.f", Kind.CALL),
        ("assistant", "commentary", None, Kind.ANSWER),
        ("assistant", "commentary", "python", Kind.REASONING),
        ("assistant", None, None, Kind.ANSWER),
        ("user", None, None, None),
        ("tool", "commentary", "assistant", None),
        (None, "final", None, None),
    ],
)
def test_kinds(role, channel, recipient, kind):
    assert kind_of(role, channel, recipient) is kind


def message_of(generated: list[int], **fields) -> tuple:
    answer = chat(FakeEngine(generated), **fields)["choices"][0]
    return answer["message"]["reasoning_content"], answer["message"]["content"], answer["finish_reason"]


def test_an_answer_without_reasoning_is_an_answer(patched, tokens):
    generated = tokens("<|channel|>final<|message|>Four.<|return|>")
    with patched():
        assert message_of(generated) == ("Four.", "Four.", "stop")
        assert message_of(generated, tool_flags=False) == ("Four.", "", "stop")
    with patched(*READING):
        assert message_of(generated) == (None, "Four.", "stop")
        assert message_of(generated, tool_flags=False) == (None, "Four.", "stop")


def test_an_empty_answer_is_an_answer(patched, tokens):
    generated = tokens("<|channel|>final<|message|><|return|>")
    with patched(*READING):
        for flags in (True, False):
            assert message_of(generated, tool_flags=flags) == (None, "", "stop")


def test_an_answer_that_is_cut_off_keeps_its_text(patched, tokens):
    cut = tokens(ANSWER)[:-2]
    with patched():
        assert message_of(cut) == ("hm", None, "length")  # with the tool parser the text is gone
    with patched(*READING):
        assert message_of(cut) == ("hm", "Four", "length")
        assert message_of(cut, tool_flags=False) == ("hm", "Four", "length")
        assert message_of(tokens("<|channel|>final<|message|>Fo"), tool_flags=False) == (None, "Fo", "length")
        assert message_of(tokens("<|channel|>analysis<|message|>h")) == ("h", None, "length")


def test_reasoning_can_be_left_out(patched, tokens):
    with patched(*READING):
        assert message_of(tokens(ANSWER), include_reasoning=False) == (None, "Four.", "stop")


def test_a_response_with_a_preamble_is_not_an_error(patched, tokens):
    preamble = tokens(
        "<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>analysis to=functions.get_weather json<|message|>{}<|call|>"
    )
    with patched():
        assert "Unknown recipient: None" in respond(FakeEngine(preamble))["error"]["message"]
    with patched(*READING):
        output = respond(FakeEngine(preamble))["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    assert output[0]["content"][0]["text"] == "Let me look."
    assert (output[1]["name"], output[1]["arguments"]) == ("get_weather", "{}")


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("<|channel|>commentary<|message|>Let me", ["message"]),
        ("<|message|>no channel", ["message"]),
        ("<|channel|>nonsense<|message|>no such channel<|return|>", ["message"]),
        ("<|channel|>commentary to=functions.f json<|message|>{", []),
        ("<|channel|>commentary to=nobody<|message|>{}<|call|>", ["reasoning"]),
        ("no message at all", []),
    ],
)
def test_every_output_makes_a_response(patched, tokens, text, kinds):
    with patched(*READING):
        assert [item["type"] for item in respond(FakeEngine(tokens(text)))["output"]] == kinds
