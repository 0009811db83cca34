"""One reading of the model's turn: forced calls, calls that are not wanted, stop strings, and what is cut off."""

from __future__ import annotations

import pytest
from openai_harmony import Role
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from npu_gptoss.harmony.parser import TolerantParser
from npu_gptoss.serving.compat.stops import mark
from npu_gptoss.serving.compat.turn import Reading, Turn, forced_calls
from tests.serving.compat.conftest import TELLING
from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, stream_chat, told

pytestmark = pytest.mark.serving

THOUGHT = "<|channel|>analysis<|message|>STOP is a word.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def final(text: str) -> str:
    return f"<|channel|>final <|constrain|>json<|message|>{text}<|return|>"


def call(arguments: str, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{arguments}{end}"


def test_a_forced_call_has_the_shape_of_a_call_streamed_too(patched, tokens, everywhere):
    written = final('[ {"name": "get_weather", "parameters": {"city":  "Zürich"}}, {"parameters":{}, "name":"other"}]')
    with patched("harmony-parser", "chat-stream-tokens"):
        stock = told(stream_chat(FakeEngine(tokens(written)), tools=[WEATHER], tool_choice="required"))
        assert (stock["calls"], stock["content"][0]) == ([], "[")
    calls = [["get_weather", '{"city":  "Zürich"}'], ["other", "{}"]]
    assert everywhere(THOUGHT + written, tool_choice="required") == (None, "STOP is a word.", calls, "tool_calls")
    found = everywhere(final('{"city": "Rome"}'), tool_choice=NAMED)
    assert found == (None, None, [["get_weather", '{"city": "Rome"}']], "tool_calls")


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    "before", ["", '<|channel|>commentary<|message|>{"city": "Oslo"}<|end|><|start|>assistant'], ids=["", "preamble"]
)
def test_a_forced_call_that_the_model_makes_by_itself_is_left_as_it_is(everywhere, choice, before):
    assert everywhere(before + call('{"city": "Rome"}'), tool_choice=choice)[2] == [["get_weather", '{"city": "Rome"}']]


def test_a_delta_has_one_entry_of_a_call(patched, tokens):
    """instructor reads the first entry of a delta: arguments in a second one were lost."""
    with patched(*TELLING):
        chunks = stream_chat(FakeEngine(tokens(final('{"city": "Rome"}'))), tools=[WEATHER], tool_choice=NAMED)
    deltas = [choice["delta"].get("tool_calls", []) for chunk in chunks for choice in chunk["choices"]]
    (entry,) = next(entries for entries in deltas if entries)
    assert entry["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}


def test_a_stream_does_not_open_with_an_answer_of_no_text(patched, tokens):
    """pydantic-ai 1 took the empty text for the whole answer and did not run the tool."""
    with patched(*TELLING):
        chunks = stream_chat(FakeEngine(tokens(THOUGHT + call('{"city": "Rome"}'))), tools=[WEATHER])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert all(choice["delta"].get("content") is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("written", ['[{"name": "get_wea', '["get_weather"]', "Sorry.", "{}", '[{"name": 1}]', ""])
def test_what_is_no_call_is_told_as_written(everywhere, written):
    assert everywhere(final(written), tool_choice="required") == (written, None, [], "stop")


def test_arguments_are_the_models_own_text(everywhere):
    odd = '{ "city" :"Z\\u00fcrich",\n"n": 1.0}'
    assert everywhere(call(odd))[2] == [["get_weather", odd]]
    nobody_forced = '[{"name": "get_weather", "parameters": {}}]'
    assert everywhere(final(nobody_forced))[:3] == (nobody_forced, None, [])


def test_tool_choice_none_calls_no_tool(patched, tokens, everywhere):
    def is_shown(choice: str) -> bool:
        engine = FakeEngine(tokens(final("4")))
        chat(engine, tools=[WEATHER], tool_choice=choice)
        return "get_weather" in decoded(tokens, engine)

    with patched():
        assert is_shown("none")
        answer = chat(FakeEngine(tokens(call("{}"))), tools=[WEATHER], tool_choice="none")
        assert answer["choices"][0]["message"]["tool_calls"]
    with patched(*TELLING, "chat-prompt"):
        assert (is_shown("auto"), is_shown("none")) == (True, False)
    told_all = everywhere(THOUGHT + call('{"city": "Rome"}'), tool_choice="none")
    assert told_all == ('{"city": "Rome"}', "STOP is a word.", [], "stop")


def decoded(tokens, engine: FakeEngine) -> str:
    from vllm.entrypoints.harmony_utils import get_encoding

    return get_encoding().decode(engine.prompts[0])


def test_several_calls_have_indices_and_ids_of_their_own(patched, tokens):
    text = call('{"city": "Rome"}', "<|end|>") + "<|start|>assistant" + call('{"city": "Oslo"}')
    with patched(*TELLING):
        chunks = stream_chat(
            FakeEngine([tokens(text), tokens(final("4"))], bite=2),
            n=2,
            tools=[WEATHER],
            stream_options={"include_usage": True},
        )
    deltas = [part for chunk in chunks for choice in chunk["choices"] for part in choice["delta"].get("tool_calls", ())]
    assert [part["index"] for part in deltas if part.get("id")] == [0, 1]
    assert len({part["id"] for part in deltas if part.get("id")}) == 2
    assert (told(chunks, 0)["finish"], told(chunks, 1)["finish"]) == ("tool_calls", "stop")
    assert (told(chunks, 0)["content"], told(chunks, 1)["content"], told(chunks, 1)["calls"]) == ("", "4", [])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens(text)) + len(tokens(final("4")))


def test_streamed_log_probabilities_are_those_of_the_whole_answer(patched, tokens):
    text = tokens(THOUGHT + final("4"))
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    with patched(*TELLING):
        whole = chat(FakeEngine(text), **fields)["choices"][0]["logprobs"]["content"]
        chunks = stream_chat(FakeEngine(text, 3), **fields)
    streamed = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for choice in streamed for token in choice["logprobs"]["content"]] == whole
    assert [[f"<{token}>"] for token in text] == [[t["token"] for t in c["logprobs"]["content"]] for c in streamed]
    assert [[token] for token in text] == [choice["token_ids"] for choice in streamed]


def test_clients_find_the_reasoning_by_both_names(patched, tokens):
    text = tokens(THOUGHT + FINAL + "4<|return|>")

    def by_the_other_name() -> tuple[str | None, str]:
        deltas = [choice["delta"] for chunk in stream_chat(FakeEngine(text)) for choice in chunk["choices"]]
        whole = chat(FakeEngine(text))["choices"][0]["message"].get("reasoning")
        return whole, "".join(delta.get("reasoning") or "" for delta in deltas)

    with patched():
        assert by_the_other_name() == (None, "")
    with patched("reasoning-name", "chat-stream-channels"):
        assert by_the_other_name() == ("STOP is a word.", "STOP is a word.")


def test_a_tool_needs_no_description_and_no_parameters(patched, tokens):
    bare = {"type": "function", "function": {"name": "now"}}
    engine = FakeEngine(tokens(final("4")))
    with patched():
        assert "error" in chat(engine, tools=[bare])
    with patched(*TELLING):
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
def test_a_stop_string_is_not_in_the_answer_and_ends_it(everywhere, text, stop, told_text):
    found = everywhere(THOUGHT + FINAL + text, finish="stop", responses=False, stop=stop)
    assert found == (told_text, "STOP is a word.", [], "stop")


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (FINAL + "One, two.", {"include_stop_str_in_output": True}, ("One, two", [])),
        (FINAL + "One, two.", {"min_tokens": 100}, ("One, two.", [])),
        (call('{"city": "two"}'), {}, (None, [["get_weather", '{"city": "two"}']])),
        (final('{"city": "two"}'), {"tool_choice": NAMED}, (None, [["get_weather", '{"city": "two"}']])),
    ],
    ids=["asked for", "min_tokens", "arguments", "forced call"],
)
def test_a_stop_string_that_is_asked_for_or_not_looked_for_stays(everywhere, text, fields, expected):
    content, _, calls, _ = everywhere(text, finish="stop", responses=False, stop=["two"], **fields)
    assert (content, calls) == expected


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory):
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_directory)


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
