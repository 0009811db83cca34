"""One reading of the model's turn: forced calls, calls that are not wanted, stop strings, and what is cut off."""

from __future__ import annotations

import pytest
from openai_harmony import Role
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from npu_gptoss.harmony.parser import TolerantParser
from npu_gptoss.serving.compat.stops import mark
from npu_gptoss.serving.compat.turn import Reading, Turn, forced_calls
from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, stream_chat, told

pytestmark = pytest.mark.serving

CHAT = (
    *("harmony-parser", "harmony-channels", "chat-stream-tokens", "chat-stream-channels", "tool-answers"),
    *("tools-without-flags", "forced-call-schema", "reasoning-name", "tool-description"),
)
THOUGHT = "<|channel|>analysis<|message|>STOP is a word.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def both(tokens):
    """(content, reasoning, [[function, arguments]], finish reason) of a chat; streams must agree with the whole one."""

    def ask(text: str, finish: str | None = None, bites: tuple[int, ...] = (1, 3, 100), **fields) -> tuple:
        fields.setdefault("tools", [WEATHER])
        choice = chat(FakeEngine(tokens(text), finish=finish), **fields)["choices"][0]
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
        whole = (message["content"], message["reasoning_content"], calls, choice["finish_reason"])
        assert message["reasoning"] == message["reasoning_content"]
        for bite in bites:
            answer = told(stream_chat(FakeEngine(tokens(text), bite, finish=finish), **fields))
            assert answer["error"] is None
            assert (answer["content"], answer["reasoning"]) == (whole[0] or "", whole[1] or "")
            assert (answer["calls"], answer["finish"]) == (calls, whole[3])
        return whole

    return ask


def final(text: str) -> str:
    return f"<|channel|>final <|constrain|>json<|message|>{text}<|return|>"


def call(arguments: str, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{arguments}{end}"


def test_a_forced_call_has_the_shape_of_a_call_streamed_too(patched, tokens, both):
    written = final('[ {"name": "get_weather", "parameters": {"city":  "Zürich"}}, {"parameters":{}, "name":"other"}]')
    with patched("harmony-parser", "chat-stream-tokens"):
        stock = told(stream_chat(FakeEngine(tokens(written)), tools=[WEATHER], tool_choice="required"))
        assert (stock["calls"], stock["content"][0]) == ([], "[")
    with patched(*CHAT):
        calls = [["get_weather", '{"city":  "Zürich"}'], ["other", "{}"]]
        assert both(THOUGHT + written, tool_choice="required") == (None, "STOP is a word.", calls, "tool_calls")
        found = both(final('{"city": "Rome"}'), tool_choice=NAMED)
        assert found == (None, None, [["get_weather", '{"city": "Rome"}']], "tool_calls")


def test_a_delta_has_one_entry_of_a_call(patched, tokens):
    """instructor reads the first entry of a delta: arguments in a second one were lost."""
    with patched(*CHAT):
        chunks = stream_chat(FakeEngine(tokens(final('{"city": "Rome"}'))), tools=[WEATHER], tool_choice=NAMED)
    deltas = [choice["delta"].get("tool_calls", []) for chunk in chunks for choice in chunk["choices"]]
    (entry,) = next(entries for entries in deltas if entries)
    assert entry["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}


def test_a_stream_does_not_open_with_an_answer_of_no_text(patched, tokens):
    """pydantic-ai 1 took the empty text for the whole answer and did not run the tool."""
    with patched(*CHAT):
        chunks = stream_chat(FakeEngine(tokens(THOUGHT + call('{"city": "Rome"}'))), tools=[WEATHER])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all(choice["delta"].get("content") is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("written", ['[{"name": "get_wea', '["get_weather"]', "Sorry.", "{}", '[{"name": 1}]', ""])
def test_what_is_no_call_is_told_as_written(patched, both, written):
    with patched(*CHAT):
        assert both(final(written), tool_choice="required") == (written, None, [], "stop")


def test_arguments_are_the_models_own_text(patched, both):
    odd = '{ "city" :"Z\\u00fcrich",\n"n": 1.0}'
    with patched(*CHAT):
        assert both(call(odd))[2] == [["get_weather", odd]]
        assert both(call(""))[2] == [["get_weather", "{}"]]  # clients read JSON


def test_tool_choice_none_calls_no_tool(patched, tokens, both):
    with patched():
        hidden = FakeEngine(tokens(final("4")))
        chat(hidden, tools=[WEATHER], tool_choice="none")
        assert "get_weather" in decoded(tokens, hidden)
        assert chat(FakeEngine(tokens(call("{}"))), tools=[WEATHER], tool_choice="none")["choices"][0]["message"][
            "tool_calls"
        ]
    with patched(*CHAT, "chat-prompt"):
        shown, hidden = FakeEngine(tokens(final("4"))), FakeEngine(tokens(final("4")))
        chat(shown, tools=[WEATHER])
        chat(hidden, tools=[WEATHER], tool_choice="none")
        assert "get_weather" in decoded(tokens, shown)
        assert "get_weather" not in decoded(tokens, hidden)
        content, _, calls, finish = both(THOUGHT + call('{"city": "Rome"}'), tool_choice="none")
        assert (content, calls, finish) == ('{"city": "Rome"}', [], "stop")


def decoded(tokens, engine: FakeEngine) -> str:
    from vllm.entrypoints.harmony_utils import get_encoding

    return get_encoding().decode(engine.prompts[0])


def test_a_call_that_is_cut_off_is_the_same_in_both_and_counts_as_cut_off(patched, both):
    with patched(*CHAT):
        assert both(call('{"city": "Ro', end="")) == (None, None, [["get_weather", '{"city": "Ro']], "length")


def test_several_calls_have_indices_and_ids_of_their_own(patched, tokens, both):
    text = call('{"city": "Rome"}', "<|end|>") + "<|start|>assistant" + call('{"city": "Oslo"}')
    calls = [["get_weather", '{"city": "Rome"}'], ["get_weather", '{"city": "Oslo"}']]
    with patched(*CHAT):
        assert both(text)[2:] == (calls, "tool_calls")
        chunks = stream_chat(
            FakeEngine([tokens(text), tokens(final("4"))], bite=2),
            n=2,
            tools=[WEATHER],
            stream_options={"include_usage": True},
        )
    deltas = [part for chunk in chunks for choice in chunk["choices"] for part in choice["delta"].get("tool_calls", ())]
    ids = [part["id"] for part in deltas if part.get("id")]
    assert [part["index"] for part in deltas if part.get("id")] == [0, 1]
    assert len(set(ids)) == 2
    assert (told(chunks, 0)["finish"], told(chunks, 1)["finish"]) == ("tool_calls", "stop")
    assert told(chunks, 1)["content"] == "4"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens(text)) + len(tokens(final("4")))


def test_streamed_log_probabilities_are_those_of_the_whole_answer(patched, tokens):
    text = tokens(THOUGHT + final("4"))
    with patched(*CHAT):
        whole = chat(FakeEngine(text), logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
        chunks = stream_chat(FakeEngine(text, 3), logprobs=True, top_logprobs=1)
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for part in streamed for token in part["content"]] == whole
    assert len(whole) == len(text)


def test_a_tool_needs_no_description_and_no_parameters(patched, tokens):
    bare = {"type": "function", "function": {"name": "now"}}
    engine = FakeEngine(tokens(final("4")))
    with patched():
        assert "error" in chat(engine, tools=[bare])
    with patched(*CHAT):
        assert chat(engine, tools=[bare])["choices"][0]["message"]["content"] == "4"
        assert "type now = () => any;" in decoded(tokens, engine)


# Stop strings


@pytest.mark.parametrize(
    ("text", "stop", "told_text"),
    [
        ("One, two, three.", ["two"], "One, "),
        ("One, two, three.", ["o, three", "two,"], "One, "),
        ("One, two, three.", [", t"], "One"),
        ("One, two, tw", ["two, two"], "One, two, tw"),  # held back to the end, and told then
        ("One, two, two!", ["two, twx"], "One, two, two!"),
        ("One", ["STOP", "assistant", "final"], "One"),  # in reasoning and headers alone
        ("Two\n\nlines", "\n\n", "Two"),
    ],
)
def test_a_stop_string_is_not_in_the_answer_and_ends_it(patched, both, text, stop, told_text):
    with patched(*CHAT):
        content, reasoning, _, finish = both(THOUGHT + FINAL + text, finish="stop", stop=stop)
        assert (content, reasoning, finish) == (told_text, "STOP is a word.", "stop")


def test_a_stop_string_can_be_asked_for_and_min_tokens_puts_it_off(patched, tokens, both):
    with patched(*CHAT):
        text = FINAL + "One, two, three."
        assert both(text, finish="stop", stop=["two"], include_stop_str_in_output=True)[0] == "One, two"
        assert both(text, finish="stop", stop=["two"], min_tokens=len(tokens(text)) - 2)[0] == "One, two, three."


def test_a_stop_string_does_not_cut_the_arguments_of_a_call(patched, both):
    with patched(*CHAT):
        assert both(call('{"city": "Rome"}'), stop=["Rome"])[2] == [["get_weather", '{"city": "Rome"}']]
        forced = both(final('{"city": "Rome"}'), stop=["Rome"], tool_choice=NAMED)
        assert forced[2] == [["get_weather", '{"city": "Rome"}']]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny(folder, trained=True, mxfp4=True)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tokens_until_stop(tokenizer, generated: list[int], marked: bool, bite: int, **fields) -> int | None:
    """After how many tokens the engine ends a request; None when it does not."""
    parameters = SamplingParams(max_tokens=100, **fields)
    if marked:
        mark(parameters)
    request = EngineCoreRequest("r", [1], None, parameters, None, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    for first in range(0, len(generated), bite):
        if detokenizer.update(generated[first : first + bite], False):
            return first + bite
    return None


@pytest.mark.parametrize("bite", [1, 4])
def test_the_engine_stops_at_the_stop_strings_of_the_answer_alone(patched, harmony, tokens, tokenizer, bite):
    generated = tokens(THOUGHT + FINAL + "One, two, three.<|return|>")
    before = len(tokens(THOUGHT + FINAL))
    with patched():
        assert tokens_until_stop(tokenizer, generated, True, bite, stop=["STOP"]) < before
        assert tokens_until_stop(tokenizer, generated, True, bite, stop=["final"]) < before + bite
    with patched("answer-stops"):
        assert tokens_until_stop(tokenizer, generated, True, bite, stop=["STOP", "final"]) is None
        assert before < tokens_until_stop(tokenizer, generated, True, bite, stop=["two"]) < len(generated)
        assert tokens_until_stop(tokenizer, generated, True, bite, stop=["two"], min_tokens=len(generated)) is None
        assert tokens_until_stop(tokenizer, generated, False, bite, stop=["STOP"]) < before  # completions: as ever


# The machine itself


def test_every_end_of_a_turn_tells_the_same_streamed_and_whole(harmony, tokens):
    """Cut off after any token, under any reading: what the events told is what the parts hold."""
    text = tokens(
        THOUGHT + "<|channel|>commentary<|message|>Let me 🜁 see.<|end|><|start|>assistant" + call('{"a": 1}', "<|end|>")
    ) + tokens("<|start|>assistant" + final('[{"name": "f", "parameters": {}}]'))
    readings = [Reading(), Reading("none"), Reading("required"), Reading("function", "f"), Reading(stop=("see", "a"))]
    for reading in readings:
        for cut in range(len(text) + 1):
            turn = Turn(TolerantParser(harmony, Role.ASSISTANT), reading)
            events = [event for token in text[:cut] for event in turn.feed(token)] + turn.end("length")
            for part in turn.parts:
                own = [event for event in events if event.part is part]
                assert (own[0].what, own[-1].what) == ("begun", "ended")
                assert "".join(event.text for event in own) == part.text
                assert part.complete is not None
            assert [event.part.number for event in events] == sorted(event.part.number for event in events)


@pytest.mark.parametrize(
    ("content", "calls"),
    [
        ('[{"name":"f","parameters":{"a":[1,{"b":"}]"}]}}]', [("f", '{"a":[1,{"b":"}]"}]}')]),
        (
            '\n[ { "parameters" : { } , "name" : "f" } , {"name":"g","parameters":{"x":1}} ]\n',
            [("f", "{ }"), ("g", '{"x":1}')],
        ),
        ('[{"name":"f"}]', []),
        ('[{"name":"f","parameters":{}},1]', []),
        ('{"name":"f","parameters":{}}', []),
        ("[]", []),
        ("[" * 100_000, []),
    ],
)
def test_forced_calls_keep_the_text_of_their_arguments(content, calls):
    assert forced_calls(Reading("required"), content) == calls
    assert forced_calls(Reading(), content) == []
