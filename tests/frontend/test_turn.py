"""Every turn of the model ends in text, reasoning or a call, and a stream equals a whole answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from openai_harmony import HarmonyEncoding

from npu_gptoss.frontend import chat
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.turn import Reading, Turn, forced_calls
from npu_gptoss.harmony.parser import TolerantParser
from tests.frontend.apis import answered, gathered
from tests.frontend.conftest import MESSAGES, Script, run
from tests.frontend.turns import (
    BASH,
    CALL,
    FOUR,
    NAMED,
    NEXT,
    PARIS,
    THOUGHT,
    THOUGHT_FOUR,
    TURNS,
    TWO_CALLS,
    WEATHER,
    call_to,
    called,
    final,
)
from tests.harmony.test_parser import Written, tokens_of, well_formed

FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>" + NEXT
ASKED = {"tools": [WEATHER]}
FORCED = ASKED | {"tool_choice": "required"}
ROME = '[ {"name": "get_weather", "parameters": {"city":  "Zürich"}}, {"parameters":{}, "name":"other"}]'
ODD = '{ "city" :"Z\\u00fcrich",\n"n": 1.0}'
OSLO = '{"city": "Oslo"}'

# the model's text, the fields of the request, and the answer, as in turns.py
READ: dict[str, tuple[str, dict[str, Any], tuple]] = {
    "an empty answer": (FINAL + "<|return|>", {}, ("", "", [], "stop")),
    "a preamble and a call": (PREAMBLE + CALL, ASKED, ("I look.", "", [PARIS], "tool_calls")),
    "a call with a bad header": (CALL.replace("json<", "json now<"), ASKED, ("", "", [PARIS], "tool_calls")),
    "cut in the reasoning": ("<|channel|>analysis<|message|>h", {}, ("", "h", [], "length")),
    "cut in the preamble": (PREAMBLE[: PREAMBLE.index(" look")], {}, ("I", "", [], "length")),
    "cut within words to a tool": ("<|channel|>commentary to=python<|message|>1+", {}, ("", "1+", [], "length")),
    "words to a tool, and an answer": (
        "<|channel|>commentary to=python<|message|>1+1<|end|>" + FOUR,
        {},
        ("Four.", "1+1", [], "stop"),
    ),
    "a dash behind the channel": ("<|channel|>analysis–<|message|>hm", {}, ("", "hm", [], "length")),
    "a header begun twice": (
        "<|channel|>final<|start|>assistant<|channel|>analysis<|message|>hm",
        {},
        ("", "hm", [], "length"),
    ),
    "a header that says nothing": (
        THOUGHT + "<|start|>nonsense 1 2 3<|message|>Four?<|end|>" + FOUR,
        {},
        ("Four?\nFour.", "hm", [], "stop"),
    ),
    "a forced call with spaces": (
        THOUGHT + NEXT + final(ROME),
        FORCED,
        ("", "hm", [["get_weather", '{"city":  "Zürich"}'], ["other", "{}"]], "tool_calls"),
    ),
    "a forced call after a preamble": (
        f"<|channel|>commentary<|message|>{OSLO}<|end|>{NEXT}{CALL}",
        ASKED | {"tool_choice": NAMED},
        (OSLO, "", [PARIS], "tool_calls"),
    ),
    "arguments of the model's own spelling": (CALL.replace(PARIS[1], ODD), ASKED, called("get_weather", ODD)),
    "JSON of a call that is not forced": (final(ROME), ASKED, (ROME, "", [], "stop")),
    **{
        f"no call: {text:.12}": (final(text), FORCED, (text, "", [], "stop"))
        for text in ('[{"name": "get_wea', '["get_weather"]', "Sorry.", "{}", '[{"name": 1, "parameters": {}}]')
    },
}
# headers of a second message that openai-harmony's strict parser raises at, each before an answer "Four."
HEADERS = (
    "<|start|>assistant–commentary<|channel|>final x y z",
    "<|start|>robot<|channel|>final",
    "<|start|>assistant<|start|>assistant<|channel|>final",
    "<|start|>assistant<|channel|>final <|constrain|>json and more",
    "<|start|>user foo bar baz<|message|>???<|end|><|start|>assistant<|channel|>final",
    "<|start|>user<|channel|>final x y z<|message|>???<|end|><|start|>assistant<|channel|>final",
)
READ |= {header: (THOUGHT + header + "<|message|>Four.<|return|>", {}, THOUGHT_FOUR) for header in HEADERS}


def both(ask: Any, text: str, bites: Sequence[int] = (1, 3, 100), **fields: Any) -> tuple:
    """Reads the same answer whole and as streams."""
    choice = ask(text, **fields)["choices"][0]
    whole = answered(choice["message"], choice["finish_reason"])
    for bite in bites:
        assert gathered(ask(text, bite, **fields)) == whole, bite
    return whole


@pytest.mark.parametrize("name", TURNS | READ)
def test_a_spelling_loses_text_or_a_call(ask, name):
    text, fields, want = (TURNS | READ)[name]
    assert both(ask, text, **fields) == want


@pytest.mark.parametrize(
    "rest",
    [
        "<|return|>",
        " and so on",
        "<|start|>assistant<|channel|>final<|message|>Once more.<|return|>",
        "<|start|>user<|message|>And 3 + 3?<|end|><|start|>assistant<|channel|>final<|message|>Six",
        "<|end|><|message|><|channel|><|call|>",
    ],
)
def test_tokens_after_the_turn_change_it(ask, rest):
    """ignore_eos, and so every load test, has them."""
    assert both(ask, THOUGHT + FOUR + rest)[:3] == ("Four.", "hm", [])


def test_a_stream_is_silent_while_the_model_writes_on(ask):
    """A load test with ignore_eos measures the time between the chunks."""
    chunks = [json.loads(line[6:]) for line in ask(THOUGHT + FOUR + " and so on", bite=1)]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[-4:]] == [{}] * 4


@pytest.mark.parametrize(
    ("text", "fields", "want"),
    [
        ("One, two, three.", {"stop": ["two"]}, "One, "),
        ("One, two, three.", {"stop": "two"}, "One, "),
        ("One, two, three.", {"stop": ["o, three", "two,"]}, "One, "),
        ("One, two, three.", {"stop": [", t"]}, "One"),
        ("One, two, tw", {"stop": ["two, two"]}, "One, two, tw"),  # held back to the end
        ("One, two, two!", {"stop": ["two, twx"]}, "One, two, two!"),
        ("One", {"stop": ["hm", "assistant", "final"]}, "One"),  # in reasoning and headers alone
        ("Two\n\nlines", {"stop": "\n\n"}, "Two"),
        ("Two\n\nlines", {"stop": ["es", "li"]}, "Two\n\n"),  # of one token
        ("One, two.", {"stop": ["", "two"]}, "One, "),
        ("One, two.", {"stop": ["two"], "include_stop_str_in_output": True}, "One, two"),
        ("One, two.", {"stop": ["two"], "min_tokens": 100}, "One, two."),
    ],
)
def test_a_stop_string_is_overlooked_or_cuts_too_much(ask, text, fields, want):
    assert both(ask, THOUGHT + NEXT + FINAL + text, finish="stop", **fields) == (want, "hm", [], "stop")


@pytest.mark.parametrize("before", ["", PREAMBLE.replace("look", "look at Paris")])
@pytest.mark.parametrize("fields", [ASKED, ASKED | {"tool_choice": NAMED}])
def test_a_stop_string_cuts_arguments(ask, fields, before):
    text = CALL if fields is ASKED else before + final(PARIS[1])
    assert both(ask, text, stop=["Paris"], **fields)[2] == [PARIS]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{\n "cmd": "a\\"\\\\\n\tb"\n}', '{\n "cmd": "a\\"\\\\\\n\\tb"\n}'),
        (r'{"cmd": "grep \d C:\Users \u00e9\n"}', r'{"cmd": "grep \\d C:\\Users \u00e9\n"}'),
        ('{"cmd": "a\\\nb"}', r'{"cmd": "a\\\nb"}'),
        (' {"cmd": "\\', ' {"cmd": "\\'),
        ('*** "a\nb\\d"', '*** "a\nb\\d"'),
    ],
)
def test_arguments_are_no_json_by_a_line_end_or_a_backslash(ask, written, sent):
    """mistral-vibe issues 216 and 615, rikkahub issue 1421."""
    text = call_to("commentary to=functions.bash <|constrain|>json", written)
    assert both(ask, text, tools=[BASH])[2] == [["bash", sent]]


def test_reasoning_that_goes_on_from_the_prompt_is_an_answer(ask):
    begun = [*MESSAGES, {"role": "assistant", "reasoning": "I hum"}]
    fields = {"messages": begun, "continue_final_message": True}
    assert both(ask, " more.<|end|>" + FOUR, **fields) == ("Four.", " more.", [], "stop")


def test_json_behind_a_call_is_no_second_call(ask):
    written = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    text = CALL.replace("<|call|>", "<|end|>") + NEXT + final(written)
    assert both(ask, text, **FORCED) == (written, "", [PARIS], "tool_calls")


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather code",
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>final <|constrain|>json",
        "<|channel|>analysis",
    ],
)
def test_a_header_that_is_cut_off_is_text(library, encoder, header):
    request = chat.read({"messages": MESSAGES, "tools": [WEATHER]})
    for before in ("", THOUGHT, THOUGHT + NEXT):
        tokens = tokens_of(library, (before, header))
        for cut in range(len(tokens_of(library, (before,))), len(tokens) + 1):
            turn = request.asked.turn(encoder).read(tokens[:cut], "length")
            assert "".join(part.text for part in turn.parts) == ("hm" if before else ""), library.decode(tokens[:cut])


def test_a_turn_that_ends_anywhere_is_streamed_otherwise(library, tokens):
    text = tokens(THOUGHT + NEXT + PREAMBLE.replace("I look", "I 🜁 see") + TWO_CALLS.replace("<|call|>", "<|end|>"))
    text += tokens(NEXT + final('[{"name": "f", "parameters": {}}]'))
    readings = [Reading(), Reading("none"), Reading("required"), Reading("function", "f"), Reading(stop=("see", "a"))]
    for reading in readings:
        for cut in range(len(text) + 1):
            turn = Turn(TolerantParser(library), reading)
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
def test_forced_calls_have_other_arguments_than_were_written(content, calls):
    assert forced_calls(Reading("required"), content) == calls
    assert forced_calls(Reading(), content) == []


BEGINS = ("", "assistant", "<|start|>", "<|start|>assistant<|start|>assistant", "\n<|start|>assistant")
MARKS = ("start", "end", "message", "channel", "constrain", "return", "call")


def spoiled(messages: list[Written], draw: random.Random) -> list[str]:
    """The same texts, none of them touched, in messages whose headers and surroundings are badly spelled."""
    parts = []
    for index, message in enumerate(messages):
        begin = draw.choice((message.begin, *BEGINS)) if index else message.begin
        header = draw.choice(
            (
                message.header,
                message.header.replace("<|channel|>", "<|channel|>––"),
                message.header + " nonsense",
                message.header + "<|channel|>" + message.header.removeprefix("<|channel|>"),
                "<|constrain|>" + message.header,
            )
        )
        parts += (begin, f"{header}<|message|>", message.text, message.end)
        if message.end == "<|end|>":
            parts.append(draw.choice(("", "", " junk ", "<|end|>", "<|constrain|>")))
    return parts


def noisy(library: HarmonyEncoding, draw: random.Random) -> list[int]:
    """Well-formed messages of which tokens are left out, exchanged, or followed by any others."""
    marks = library.encode("".join(f"<|{mark}|>" for mark in MARKS), allowed_special="all")
    tokens = tokens_of(library, (piece for message in well_formed(draw) for piece in message.pieces))
    for _ in range(draw.randrange(6)):
        at = draw.randrange(len(tokens))
        tokens[at : at + draw.randrange(2)] = draw.choice(([], [draw.choice(marks)], [draw.randrange(201_088)]))
        tokens = tokens or [200_006]
    return tokens


def test_text_is_lost_by_the_spelling_of_its_header(ask):
    draw = random.Random(0)
    for _ in range(150):
        messages = well_formed(draw)
        pieces = spoiled(messages, draw)
        told = both(ask, "".join(pieces), bites=(draw.randrange(1, 6),))
        text = "\n".join((*told[:2], *(arguments for _, arguments in told[2])))
        assert not [message.text for message in messages if message.text not in text], f"{told} {pieces}"


def test_any_tokens_raise_or_are_streamed_otherwise(library, encoder):
    draw = random.Random(1)
    request = chat.read({"messages": MESSAGES})
    for _ in range(300):
        tokens = noisy(library, draw)
        whole, streamed = (request.asked.turn(encoder) for _ in range(2))
        whole.read(tokens, "length")
        events = [event for token in tokens for event in streamed.feed(token)] + streamed.end("length")
        assert whole.parts == streamed.parts
        assert "".join(part.text for part in whole.parts) == "".join(event.text for event in events)


def test_a_header_of_a_grammar_hides_the_answer_or_the_call(library, encoder):
    """vLLM 0.33's grammars let the model write these headers; test_ledger.py fails when it has others."""
    request = chat.read({"messages": MESSAGES, "tools": [WEATHER]})
    for text, kind in ((f"{begin}{{}}", kind) for kind, begins in GRAMMAR_HEADERS.items() for begin in begins):
        turn = request.asked.turn(encoder).read(tokens_of(library, (text, "<|call|>")), "stop")
        (part,) = turn.parts
        assert (part.kind.name, part.name, part.text) == (kind, "get_weather" if kind == "CALL" else None, "{}"), text


_FORMATS = (" json", " <|constrain|>json", "<|constrain|>json", "")
GRAMMAR_HEADERS = {
    "ANSWER": [f"<|channel|>final{form}<|message|>" for form in _FORMATS],
    "CALL": [
        f"{begin}{form}<|message|>"
        for channel in ("commentary", "analysis", "final")
        for begin in (
            f"<|channel|>{channel} to=functions.get_weather",
            f" to=functions.get_weather<|channel|>{channel}",
        )
        for form in _FORMATS
    ],
}


# Chunks


def deltas(lines: Sequence[str]) -> list[dict[str, Any]]:
    return [choice["delta"] for line in lines for choice in json.loads(line[6:])["choices"]]


def test_a_delta_has_two_entries_of_a_call(ask):
    """instructor reads only a delta's first entry and lost arguments in a second one."""
    lines = ask(final(PARIS[1]), 100, tools=[WEATHER], tool_choice=NAMED)
    (entry,) = next(delta["tool_calls"] for delta in deltas(lines) if "tool_calls" in delta)
    assert entry["function"] == {"name": "get_weather", "arguments": PARIS[1]}


def test_a_stream_of_a_call_opens_with_an_empty_text(ask):
    """pydantic-ai 1 took the empty text for the whole answer and did not run the tool."""
    first, *rest = deltas(ask(THOUGHT + NEXT + CALL, 3, **ASKED))
    assert first == {"role": "assistant", "content": None}
    assert all(delta.get("content") is None for delta in rest)


def lines_of(script: Any, library: Any, encoder: Any, **fields: Any) -> list[str]:
    """The lines of a stream over the steps of a script."""
    request = chat.read({"messages": MESSAGES, "stream": True} | fields)
    answer = chat.Answer(request, chat.Facts("c", "m", 7), lambda: request.asked.turn(encoder))
    return run(answer, script, whole=False)


def test_samples_share_the_indices_of_their_calls(library, encoder, tokens):
    class Two(Script):
        async def steps(self):
            other = Script(tokens(final("4")), 2)
            async for step in super().steps():
                yield step
            async for step in other.steps():
                yield Step([Piece(1, step.pieces[0].token_ids, step.pieces[0].finish)])

    options = {"include_usage": True, "continuous_usage_stats": True}
    made = tokens(TWO_CALLS)
    lines = lines_of(Two(made, 2), library, encoder, n=2, stream_options=options, **ASKED)
    entries = [part for delta in deltas(lines) for part in delta.get("tool_calls", ())]
    assert [part["index"] for part in entries if part.get("id")] == [0, 1]
    assert len({part["id"] for part in entries if part.get("id")}) == 2
    assert gathered(lines, 0) == ("", "", [PARIS, PARIS], "tool_calls")
    assert gathered(lines, 1) == ("4", "", [], "stop")
    chunks = [json.loads(line[6:]) for line in lines]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(made) + len(tokens(final("4")))
    counts = [c["usage"]["completion_tokens"] for c in chunks[:-1] if c["choices"][0]["index"] == 0]
    assert counts == sorted(counts)
    assert counts[-1] == len(made)


def test_an_end_without_tokens_repeats_text_or_hides_its_reason(library, encoder, tokens):
    class Aborted(Script):
        async def steps(self):
            yield Step([Piece(0, self.tokens)])
            yield Step([Piece(0, [], "abort")])
            self.closed = True

    lines = lines_of(Aborted(tokens(FINAL + "cut off"), 1), library, encoder)
    assert gathered(lines) == ("cut off", "", [], "abort")


def test_token_ids_of_a_stream_differ_from_the_generated_ones(ask, tokens):
    chunks = [json.loads(line[6:]) for line in ask(THOUGHT + FOUR, 3, return_token_ids=True)]
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    assert streamed == tokens(THOUGHT + FOUR)
    whole = ask(THOUGHT + FOUR, return_token_ids=True)["choices"][0]
    assert whole["token_ids"] == streamed


def test_a_client_that_leaves_does_not_end_the_generation(library, encoder, tokens):
    request = chat.read({"messages": MESSAGES, "stream": True})
    answer = chat.Answer(request, chat.Facts("c", "m", 7), lambda: request.asked.turn(encoder))
    script = Script(tokens(THOUGHT + FOUR), 1)

    async def leave() -> None:
        lines = answer.stream(script.steps())
        await anext(lines)
        await anext(lines)
        await lines.aclose()

    asyncio.run(leave())
    assert script.closed
    assert script.given < len(script.tokens)
