"""/v1/responses: a stream and a whole response have the same items, and every kind of OpenAI's items is read."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("openai")

from openai.types.responses import Response

from npu_gptoss.frontend import responses
from npu_gptoss.frontend.response_items import Conversation, encoded
from npu_gptoss.harmony.encoding import ContextError, Encoder
from tests.frontend.apis import answered, of_response
from tests.frontend.conftest import Script, run
from tests.frontend.events import built, shapes
from tests.frontend.turns import CALL, FOUR, NEXT, THOUGHT, TURNS, TWO_CALLS, call_to, flat

WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "p", "format": GRAMMAR}
SPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [{"type": "function", "name": "look"}]}
HOSTED = [{"type": kind} for kind in ("web_search", "local_shell", "code_interpreter", "tool_search", "shell")]
USER = {"role": "user", "content": "hi"}
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>" + NEXT
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"}


def body(**fields: Any) -> dict[str, Any]:
    if "tools" in fields:
        fields["tools"] = [flat(tool) for tool in fields["tools"]]
    return {"model": "gpt-oss", "input": "hi"} | fields | {"tool_choice": flat(fields.get("tool_choice"))}


@pytest.fixture
def respond(library, encoder, tokens):
    """Returns the answer to a turn: the whole response, or the events of a stream in bites."""

    def responded(text: str, bite: int | None = None, script: type = Script, logprobs: bool = False, **fields: Any):
        request = responses.read(body(stream=bite is not None, **fields))
        facts = responses.Facts("resp_1", "gpt-oss", 7, logprobs=scored(library) if logprobs else None)
        answer = responses.Answer(request, facts, request.asked.turn(encoder))
        return run(answer, script(tokens(text), bite or 3), whole=bite is None), answer

    return responded


def scored(library):
    return lambda piece, which: [
        {"token": library.decode([piece.token_ids[i]]), "logprob": -1.0, "top_logprobs": [], "bytes": []} for i in which
    ]


@pytest.fixture
def prompt(library, encoder):
    """Returns the prompt from the developer's or the user's turn on, and the warnings."""

    def prompted(previous: Conversation | None = None, **fields: Any) -> tuple[str, tuple[str, ...]]:
        request = responses.read(body(**fields), previous=previous)
        text = library.decode(request.asked.prompt(encoder))
        return text.removesuffix("<|start|>assistant").split("<|end|>", 1)[1], request.asked.warnings

    return prompted


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "apply_patch"}])
def test_a_required_call_forgets_the_grammar_of_its_only_tool(choice: Any) -> None:
    asked = responses.read({"input": "hi", "tools": [PATCH], "tool_choice": choice}).asked
    assert asked.structure.fields == {"grammar": GRAMMAR["definition"]}
    assert asked.tools.choice.tool.own_name == "apply_patch"
    several = responses.read({"input": "hi", "tools": [PATCH, SPACE], "tool_choice": "required"}).asked
    assert several.structure.calls


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_read_alike_whole_streamed_and_by_chat(ask, respond, name):
    text, fields, want = TURNS[name]
    whole, _ = respond(text, **fields)
    choice = ask(text, **fields)["choices"][0]
    assert of_response(whole) == answered(choice["message"], choice["finish_reason"]) == want
    Response.model_validate(whole)
    for bite in (1, 3, 100):
        events, _ = respond(text, bite, **fields)
        assert built(events) == events[-1]["response"]["output"], bite
        assert shapes(events[-1]["response"]["output"]) == shapes(whole["output"]), bite


@pytest.mark.parametrize(
    "arguments", ['{"input":"*** Begin\\n"}', '{"input":"*** Begin\n"}', '{"patch":"*** Begin\\n"}', "*** Begin\n"]
)
def test_a_custom_tool_is_called_as_a_function(respond, prompt, arguments):
    """F1: Codex's apply_patch; ds4 issue 745."""
    text = call_to("commentary to=functions.apply_patch <|constrain|>json", arguments)
    for bite in (1, 3, 100):
        events, _ = respond(text, bite, tools=[PATCH])
        (item,) = built(events)
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
        assert item["id"].startswith("ctc_")
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        assert deltas == ["*** Begin\n"]
    assert "start: /.+/" in prompt(tools=[PATCH])[0]


def test_a_call_of_a_namespace_loses_its_namespace(respond, prompt):
    text = call_to("commentary to=functions.mcp__look <|constrain|>json")
    (item,) = respond(text, tools=[SPACE])[0]["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("look", "mcp", "{}")
    sent_back = [USER, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}]
    assert "functions.mcp__look to=assistant" in prompt(input=sent_back, tools=[SPACE])[0]


def test_hosted_tools_refuse_the_request(prompt):
    """F1, F14: left out, and the client is warned."""
    text, warnings = prompt(tools=[*HOSTED, WEATHER])
    assert "get_weather" in text
    assert len(warnings) == len(HOSTED)
    assert "web_search" in warnings[0]


def test_a_call_of_an_unknown_tool_ends_in_an_error(respond):
    """F8: the model writes to python."""
    response, _ = respond(THOUGHT + NEXT + call_to("commentary to=python code", "1+1"))
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["reasoning", "reasoning"]


def test_an_unknown_channel_tears_the_stream(respond):
    """F10."""
    events, _ = respond("<|channel|>comment<|message|>Four.<|return|>", 1)
    assert built(events)[0]["content"][0]["text"] == "Four."


def test_a_response_has_lists_in_usage_or_no_status(respond):
    """F13, F23."""
    response, _ = respond(THOUGHT + FOUR)
    assert [item["status"] for item in response["output"]] == ["completed", "completed"]
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 20,
    }
    assert response["tool_choice"] == "auto"
    assert response["error"] is None


@pytest.mark.parametrize("text", [CALL[: CALL.index("ris")], (THOUGHT + FOUR)[: -len("r.<|return|>")]])
def test_a_cut_item_says_that_it_is_complete(respond, text):
    """F13."""
    events, _ = respond(text, 3, tools=[WEATHER])
    assert built(events)[-1]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_more_calls_than_one_are_sent_without_parallel_calls(respond):
    for bite in (1, 100):
        events, answer = respond(TWO_CALLS, bite, tools=[WEATHER], parallel_tool_calls=False)
        assert len(built(events)) == 1
        assert len(answer.conversation().turns) == 2  # the other call gets no result


def test_reasoning_that_is_not_wanted_takes_an_index(respond):
    events, answer = respond(THOUGHT + FOUR, 3, include_reasoning=False)
    assert [item["type"] for item in built(events)] == ["message"]
    assert answer.conversation().turns[1].channel == "analysis"


def test_the_models_own_reasoning_is_lost_between_its_calls(respond, prompt):
    """F2: Codex sends back content null."""
    include = ["reasoning.encrypted_content"]
    events, _ = respond(THOUGHT + NEXT + CALL, 3, tools=[WEATHER], include=include)
    reasoning, call = built(events)
    assert reasoning["encrypted_content"] == encoded("hm")
    result = RESULT | {"call_id": call["call_id"]}
    text, _ = prompt(input=[USER, reasoning | {"content": None}, call, result], tools=[WEATHER])
    assert "<|channel|>analysis<|message|>hm<|end|>" in text
    assert respond(THOUGHT + FOUR)[0]["output"][0]["encrypted_content"] is None


def test_log_probabilities_belong_to_other_tokens(respond):
    fields = {"include": ["message.output_text.logprobs"], "logprobs": True}
    whole = respond(THOUGHT + NEXT + PREAMBLE.removesuffix(NEXT) + FOUR, **fields)[0]["output"]
    assert [item["type"] for item in whole] == ["reasoning", "message", "message"]
    for item in whole[1:]:
        (part,) = item["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    for bite in (1, 3, 100):
        events, _ = respond(THOUGHT + NEXT + PREAMBLE.removesuffix(NEXT) + FOUR, bite, **fields)
        assert shapes(built(events)) == shapes(whole)


def test_an_error_while_generating_is_no_event(respond, library, encoder, tokens):
    class Broken(Script):
        async def steps(self):
            async for step in super().steps():
                yield step
                raise RuntimeError("the wheels came off")

    with pytest.raises(RuntimeError):
        respond(THOUGHT + FOUR, 3, script=Broken)
    request = responses.read(body())
    answer = responses.Answer(request, responses.Facts("r", "m", 1), request.asked.turn(encoder))
    told = answer.last(answer.failed(RuntimeError("the wheels came off")))
    assert (told["type"], told["response"]["status"]) == ("response.failed", "failed")
    assert told["response"]["error"] == {"code": "server_error", "message": "the wheels came off"}
    Response.model_validate(told["response"])


def test_the_fields_of_a_request_do_not_reach_the_engine():
    fields = {"max_output_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "top_logprobs": 2}
    request = responses.read(body(**fields, cache_salt="s", metadata={"a": "b"}, min_p=None, nobody=1))
    assert request.asked.sampling == {
        **{"model": "gpt-oss", "max_completion_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 1},
        **{"cache_salt": "s", "logprobs": True, "top_logprobs": 2},
    }
    assert request.asked.reading.stop == ("x",)
    assert request.asked.warnings == ("nobody is no field of this API and has no effect",)
    answer = responses.Answer(request, responses.Facts("r", "m", 1), None)
    assert {name: answer.response("queued")[name] for name in ("status", "max_output_tokens", "metadata")} == {
        **{"status": "queued", "max_output_tokens": 9, "metadata": {"a": "b"}}
    }


@pytest.mark.parametrize("where", ["reasoning", "reasoning_effort", "chat_template_kwargs"])
def test_an_effort_has_no_effect_in_one_spelling(where):
    """F17."""
    value = {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "low"}}.get(where, "low")
    assert responses.read(body(**{where: value})).asked.effort == "low"


def test_a_format_is_not_held_to():
    schema = {"type": "object", "properties": {}}
    asked = responses.read(body(text={"format": {"type": "json_schema", "name": "x", "schema": schema}})).asked
    assert asked.structure.fields == {"json": schema}
    assert responses.read(body(structured_outputs={"regex": "x"})).asked.structure.fields == {"regex": "x"}
    forced = responses.read(body(tools=[WEATHER], tool_choice="required")).asked
    assert forced.structure.calls


def fitted(encoder: Encoder, limit: int, given: list[Any], **fields: Any) -> tuple[str, int]:
    """Returns the texts that the model reads of the conversation, and the prompt's length."""
    asked, prompt = responses.read(body(input=given, truncation="auto", **fields)).asked.fitted(encoder, limit)
    shown = [part for message in asked.turns for part in message.content]
    return " ".join(getattr(part, "text", None) or part.instructions for part in shown), len(prompt)


def call_of(number: int) -> list[dict[str, Any]]:
    about = {"call_id": f"c{number}"}
    return [
        {"type": "function_call", "name": "get_weather", "arguments": f"call{number}", **about},
        {"type": "function_call_output", "output": f"result{number} " * 20, **about},
    ]


def test_calls_that_share_an_id_lose_their_results_to_the_last(prompt):
    """Each turn of an agent may count its calls anew, and one without a result is none's before the next question."""
    calls = [{"type": "function_call", "call_id": "c1", "name": name, "arguments": "{}"} for name in ("now", "look")]
    results = [RESULT | {"output": f"of {each['name']}"} for each in calls]
    text, _ = prompt(input=[*([USER, *calls, *results] * 2), USER, calls[0], USER, calls[1], results[1]])
    for call, count in zip(calls, (2, 3), strict=True):
        written = f"of {call['name']}<|end|>"
        assert text.count(f"functions.{call['name']} to=assistant<|channel|>commentary<|message|>{written}") == count


def test_truncation_drops_instructions_the_question_or_half_of_a_call(encoder):
    """OpenAI's "auto": items go from the beginning. An agent's question is older than its calls."""
    history = [{"role": "user", "content": "old " * 20}, {"role": "assistant", "content": "said " * 20}]
    system = {"role": "system", "content": "rules"}
    given = [*history, system, {"role": "user", "content": "question"}, *call_of(1), *call_of(2), *call_of(3)]
    whole, length = fitted(encoder, 10_000, given, instructions="obey")
    want = whole.split()
    for limit in range(length, 0, -5):
        try:
            text, now = fitted(encoder, limit, given, instructions="obey")
        except ContextError:
            break
        words = text.split()
        assert now < limit
        assert {"obey", "rules", "question", "call3", "result3"} <= set(words)
        assert words == [word for word in want if word in set(words)]
        assert all((f"call{n}" in words) == (f"result{n}" in words) for n in (1, 2))
        assert ("old" in words) <= ("said" in words) <= ("call1" in words) <= ("call2" in words)
    assert words == ["obey", "rules", "question", "call3", *["result3"] * 20]


def test_truncation_splits_parallel_calls(encoder):
    (first, output), (second, other) = call_of(1), call_of(2)
    given = [USER, first, second, other, output, {"role": "user", "content": "question"}]
    length = fitted(encoder, 10_000, given)[1]
    assert fitted(encoder, length - 20, given)[0].split() == ["question"]


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_truncation_counts_reasoning_that_the_model_does_not_read(encoder):
    answered = [thought("because " * 400), {"role": "assistant", "content": "said"}]
    given = [{"role": "user", "content": "old " * 20}, *answered, {"role": "user", "content": "question"}]
    length = fitted(encoder, 10_000, given)[1]
    assert fitted(encoder, length - 10, given)[0].split() == ["said", "question"]


def test_truncation_parts_a_call_from_its_reasoning(encoder):
    given = [USER, thought("because " * 20), *call_of(1), *call_of(2)]
    length = fitted(encoder, 10_000, given)[1]
    found = [set(fitted(encoder, length - less, given)[0].split()) & {"because", "call1"} for less in range(1, 60, 4)]
    assert all(len(each) != 1 for each in found)
    assert set() in found


def test_truncation_leaves_no_room_for_the_answer(encoder):
    given = [{"role": "user", "content": f"{number} " * 20} for number in range(40)]
    for most, room in ((300, 300), (5000, 400)):
        assert 0 <= 800 - room - fitted(encoder, 800, given, max_output_tokens=most)[1] < 60


@pytest.mark.parametrize("last", ["word " * 900, " " * 200_000])
def test_truncation_cuts_the_newest_turn(encoder, last):
    given = [USER, {"role": "user", "content": last}]
    with pytest.raises(ContextError):
        fitted(encoder, 800, given)
    assert "hi" in fitted(encoder, 800, [{"role": "user", "content": last}, USER])[0]
    with pytest.raises(ContextError):
        responses.read(body(input=[*given, USER])).asked.fitted(encoder, 800)
