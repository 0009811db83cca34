"""The same right answer on each release of vLLM, over HTTP, whole and streamed.

The cases F1 to F26 come from a survey of public bug reports about servers of gpt-oss.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import requests

from tests.frontend.apis import APIS, gathered, of_message, of_response
from tests.frontend.turns import ANSWER, BASH, CALL, NEXT, PARIS, THOUGHT, TURNS, WEATHER, call_to
from tests.serving.openai.cases import BY_THE_ENGINE, CHATS, RESPONSES
from tests.serving.openai.conftest import NAME, Answer, Server
from tests.serving.scripted import ERROR

pytestmark = [pytest.mark.serving, pytest.mark.slow]

USER = {"role": "user", "content": ANSWER}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def content(answer: Answer) -> str:
    assert answer.status == 200, answer.text
    return answer.json["choices"][0]["message"]["content"]


# Turns


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("api", APIS)
def test_turn_is_read_alike_whole_and_streamed(server: Server, api: str, name: str) -> None:
    text, fields, want = TURNS[name]
    form, ask = APIS[api], server.ask(api)
    fields, want = form.fields(fields), form.wanted(want)
    whole = ask(text, **fields)
    assert whole.status == 200, whole.text
    assert form.whole(whole.json) == want
    assert form.streamed(ask(text, stream=True, **fields).text) == want


# F1 to F3: requests of agents


def test_tools_of_codex_are_served(server: Server) -> None:
    patch = {"type": "custom", "name": "apply_patch", "description": "p", "format": LARK}
    tools = [patch, {"type": "web_search"}]
    text = call_to("commentary to=functions.apply_patch <|constrain|>json", '{"input": "*** Begin Patch"}')
    answer = server.respond(text, tools=tools)
    (call,) = answer.json["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    assert "web_search" in answer.headers["x-npu-gptoss-warning"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
    answer = server.respond("", input=[call, output, {"role": "user", "content": ANSWER}], tools=tools)
    assert of_response(answer.json) == ("Four.", "hm", [], "stop")


def test_custom_tools_of_chat_are_served(server: Server) -> None:
    tools = [{"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": LARK}}}]
    text = call_to("commentary to=functions.run <|constrain|>json", '{"input": "ls"}')
    (call,) = server.chat(text, tools=tools).json["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "run", "input": "ls"})


# F5 to F8, F10 to F12, F24, F25 are among the turns. F9, F14 to F19, F21, F23: silent losses


def test_tool_choice_none_hides_the_tools(server: Server) -> None:
    for choice, shown in (("none", False), ("auto", True)):
        fields = {"messages": [USER], "tools": [WEATHER], "tool_choice": choice}
        assert ("get_weather" in server.prompt(**fields)) == shown
        assert content(server.chat(**fields)) == "Four."


def test_deprecated_functions_are_served(server: Server) -> None:
    function = WEATHER["function"]
    answer = server.chat(CALL, functions=[function]).json["choices"][0]
    assert (answer["message"]["function_call"], answer["finish_reason"]) == (
        {"name": "get_weather", "arguments": '{"city":"Paris"}'},
        "function_call",
    )
    deltas = [json.loads(line[6:])["choices"] for line in server.chat(CALL, functions=[function], stream=True).lines]
    calls = [
        choice["delta"]["function_call"] for chunk in deltas for choice in chunk if "function_call" in choice["delta"]
    ]
    assert "".join(call["arguments"] for call in calls) == '{"city":"Paris"}'
    history = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}},
        {"role": "function", "name": "get_weather", "content": "18 degrees"},
    ]
    prompt = server.prompt(messages=history)
    assert "to=functions.get_weather" in prompt
    assert "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>18 degrees<|end|>" in prompt


@pytest.mark.parametrize("fields", [{"add_generation_prompt": False}, {}], ids=["explicit", "default"])
def test_prefill_continues_the_answer(server: Server, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": " is four.<|return|>"}, {"role": "assistant", "content": "2 + 2"}]
    continued = {"messages": messages, "continue_final_message": True, **fields}
    assert content(server.chat(**continued)) == " is four."
    assert server.prompt(**continued).endswith("<|start|>assistant<|channel|>final<|message|>2 + 2")
    assert content(server.chat(echo=True, **continued)) == "2 + 2 is four."
    assert gathered(server.chat(stream=True, **continued).lines)[0] == " is four."
    own = server.message(messages=messages).json
    assert of_message(own)[0] == " is four."


def test_generation_prompt_that_is_switched_off_is_refused(server: Server) -> None:
    assert server.chat(ANSWER, add_generation_prompt=False).error["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"reasoning_effort": None, "reasoning": {"effort": "max"}}, "high"),
        ({"reasoning_effort": None, "reasoning": {"effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}, "low"),
    ],
)
def test_effort_is_read_in_each_spelling(server: Server, fields: dict[str, Any], effort: str) -> None:
    assert f"Reasoning: {effort}" in server.prompt(messages=[USER], **fields)


def test_thinking_parts_sent_back_are_reasoning(server: Server) -> None:
    parts = [{"type": "thinking", "thinking": "I look."}, {"type": "text", "text": "I'll look."}]
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": parts, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": ["18 degrees"]},
    ]
    prompt = server.prompt(messages=messages)
    assert "<|channel|>analysis<|message|>I look.<|end|>" in prompt
    assert "<|channel|>commentary<|message|>I'll look.<|end|>" in prompt
    assert "<|message|>18 degrees<|end|>" in prompt


def test_logprobs_belong_to_the_answer(server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": False}
    whole = server.chat(ANSWER, **fields).json["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in whole] == ["Four", "."]
    chunks = [json.loads(line[6:]) for line in server.chat(ANSWER, stream=True, **fields).lines]
    told = [choice["logprobs"]["content"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for content in told for token in content] == whole
    without_others = server.chat(ANSWER, **fields | {"top_logprobs": None}).json["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in without_others] == ["Four", "."]


def test_logprobs_have_the_bytes_of_a_part_of_a_character(server: Server) -> None:
    """vLLM gives U+FFFD for it, and the sampled token before likelier ones."""
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": False}
    text = "a\U0001f469\u200d\U0001f467\u65e5\u672c"
    turn = f"<|channel|>final<|message|>{text}<|return|>"
    (part,) = server.respond(turn, include=["message.output_text.logprobs"], top_logprobs=1).json["output"][0][
        "content"
    ]
    for tokens in (server.chat(turn, **fields).json["choices"][0]["logprobs"]["content"], part["logprobs"]):
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == text
        assert all(top["logprob"] > token["logprob"] for token in tokens for top in token["top_logprobs"])
    assert "\\xf0\\x9f\\x91" in [
        token["token"] for token in server.chat(turn, **fields).json["choices"][0]["logprobs"]["content"]
    ]


def test_usage_reports_the_reasoning_tokens(server: Server) -> None:
    usage = server.chat(ANSWER).json["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}
    streamed = server.chat(ANSWER, stream=True, stream_options={"include_usage": True}).lines[-1]
    assert json.loads(streamed[6:])["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    usage = server.respond(ANSWER).json["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 1}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_allowed_tools_of_chat_are_honoured(server: Server) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "bash"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    prompt = server.prompt(messages=[USER], tools=[WEATHER, BASH], tool_choice=choice)
    assert "bash" in prompt
    assert "get_weather" not in prompt


REFUSED = [(api, *row) for api, rows in (("chat", CHATS + BY_THE_ENGINE), ("responses", RESPONSES)) for row in rows]


@pytest.mark.parametrize(("api", "fields", "param"), REFUSED)
def test_refusal_names_the_field_and_nothing_of_pydantic(server, api, fields, param) -> None:
    error = server.ask(api)(ANSWER, **fields).error
    assert error["param"] == param, error
    assert error["code"] == 400
    for word in (
        "complaints",
        "validation error",
        "ValidatorIterator",
        "Value error",
        "Input should",
        "pydantic",
        "object at",
    ):
        assert word not in error["message"]


# Stored by vLLM


def stored(server: Server, name: str) -> requests.Response:
    return requests.get(f"{server.url}/v1/responses/{name}", timeout=60)


def test_a_response_is_stored_retrieved_and_continued(server: Server) -> None:
    first = server.respond(THOUGHT + NEXT + "<|channel|>final<|message|>One.<|return|>").json
    assert requests.get(f"{server.url}/v1/responses/{first['id']}", timeout=30).json() == first
    second = server.respond(ANSWER, previous_response_id=first["id"], enable_response_messages=True).json
    assert "One." in json.dumps(second["input_messages"])
    assert requests.get(f"{server.url}/v1/responses/resp_none", timeout=30).status_code == 404


def test_a_background_response_ends_and_its_events_replay(server: Server) -> None:
    events = server.respond(ANSWER, background=True, stream=True).events
    assert events[-1]["type"] == "response.completed"
    number = events[-1]["response"]["id"]
    reply = requests.get(f"{server.url}/v1/responses/{number}?stream=true", timeout=30)
    again = Answer(200, {}, reply.content.decode()).events
    assert again == events
    cancelled = server.post(f"/v1/responses/{number}/cancel", {})  # which changes nothing, as with OpenAI's servers
    assert (cancelled.status, cancelled.json["status"]) == (200, "completed")
    reply = requests.get(f"{server.url}/v1/responses/{number}?stream=true&starting_after=2", timeout=30)
    assert Answer(200, {}, reply.content.decode()).events == events[3:]
    queued = server.respond(ANSWER, background=True).json
    assert queued["status"] in ("queued", "in_progress", "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_response_that_failed_in_the_background_never_ends(server: Server, stream: bool) -> None:
    made = server.respond(ANSWER.removesuffix("<|return|>") + ERROR, background=True, stream=stream)
    name, end = (made.events[0]["response"] if stream else made.json)["id"], time.monotonic() + 30
    while (found := stored(server, name).json())["status"] in ("queued", "in_progress") and time.monotonic() < end:
        time.sleep(0.05)
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


def test_response_is_kept_that_must_not_be(server: Server) -> None:
    made = server.respond(ANSWER, store=False).json
    assert (made["store"], stored(server, made["id"]).status_code) == (False, 404)
    assert server.respond(ANSWER, previous_response_id=made["id"]).status == 404


def test_response_that_was_cut_cannot_be_continued(server: Server) -> None:
    first = server.respond("<|channel|>final<|message|>One, two, three.", max_output_tokens=4).json
    second = server.respond(ANSWER, previous_response_id=first["id"], enable_response_messages=True).json
    assert (first["status"], "One" in json.dumps(second["input_messages"])) == ("incomplete", True)


NULLS = (
    "parallel_tool_calls",
    "background",
    "truncation",
    "stream",
    "store",
    "tools",
    "tool_choice",
    "text",
    "include",
)


def test_nulls_of_a_response_are_its_defaults(server: Server) -> None:
    assert of_response(server.respond(ANSWER, **dict.fromkeys(NULLS)).json)[0] == "Four."
    assert server.respond(ANSWER, stream=True, background=None).events[-1]["type"] == "response.completed"


def test_stored_item_is_not_found_by_its_id(server: Server) -> None:
    """The AI SDK refers to items without a previous_response_id."""
    item = server.respond(THOUGHT + NEXT + "<|channel|>final<|message|>One.<|return|>").json["output"][1]
    sent = [{"type": "item_reference", "id": item["id"]}, USER]
    second = server.respond(input=sent, enable_response_messages=True)
    assert "One." in json.dumps(second.json["input_messages"])


def test_stream_of_a_response_without_events_is_torn(server: Server) -> None:
    first = server.respond(ANSWER).json
    reply = requests.get(f"{server.url}/v1/responses/{first['id']}?stream=true", timeout=30)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


def test_null_length_of_a_completion_is_a_fault_of_the_server(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "gpt-oss", "prompt": "Hello world", "max_tokens": None})
    assert answer.json["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_unknown_model_is_not_named_as_the_mistake(server: Server, api: str) -> None:
    answer = server.ask(api)(ANSWER, model="another")
    assert (answer.status, answer.error["param"]) == (404, "model")


@pytest.mark.parametrize("body", [{"model": {"a": 1}, "messages": [USER]}, {"model": NAME, "messages": [USER]}])
def test_body_that_is_not_checked_as_json_is_answered(server: Server, body: dict[str, Any]) -> None:
    """/tokenize read it before vLLM could refuse its type."""
    for path in ("/tokenize", "/v1/chat/completions", "/v1/messages/count_tokens"):
        assert server.post(path, body, **{"Content-Type": "text/plain"}).status == 400


def test_two_calls_are_one_without_parallel_calls(server: Server) -> None:
    text, fields, want = TURNS["two calls"]
    message = server.chat(text, parallel_tool_calls=False, **fields).json["choices"][0]["message"]
    assert [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]] == [PARIS]
    assert want[2] == [PARIS, PARIS]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'{"model": "gpt-oss", "messages": 3, "max_tokens": 5}'),
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}',
    ],
)
def test_messages_errors_have_anthropics_form(server: Server, path: str, body: bytes) -> None:
    answer = server.post(path, body)
    assert answer.status == 400, answer.text
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", "invalid_request_error")


def test_name_of_an_unknown_field_breaks_the_header_that_reports_it(server: Server) -> None:
    answer = server.chat(ANSWER, **{"a\r\nb: c": 1, **{f"\u00e9{number:099}": 1 for number in range(40)}})
    assert content(answer) == "Four."
    assert "b" not in answer.headers
    assert len(answer.headers["x-npu-gptoss-warning"]) <= 1000


def test_a_model_is_found_by_its_name(server: Server) -> None:
    """Visual Studio asks so, and takes 404 for a wrong server."""
    found = requests.get(f"{server.url}/v1/models/{NAME}", timeout=60).json()
    (listed,) = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert (found["id"], found["object"], found["max_model_len"]) == (NAME, "model", listed["max_model_len"])
    unknown = requests.get(f"{server.url}/v1/models/openai/no", timeout=60)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}])
def test_a_tool_with_a_schema_that_no_grammar_holds_is_refused(server: Server, fields: dict[str, Any]) -> None:
    """uniqueItems: pydantic's set[str]. A strict tool is held by vLLM 0.33 alone, if it may be left out."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    }
    function = {"name": "f", "parameters": schema, "strict": fields["tool_choice"] == "auto"}
    answer = server.chat(
        call_to("commentary to=functions.f json", "{}"), tools=[{"type": "function", "function": function}], **fields
    )
    assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
    if fields["tool_choice"] == "required":
        assert "in part" in answer.headers["x-npu-gptoss-warning"]


def test_many_tools_of_which_one_is_called_are_enforced_whole(server: Server) -> None:
    """vLLM 0.33 writes each schema twelve times: 128 took longer than a structure may."""
    parameters = {"type": "object", "properties": {"p": {"type": "string", "pattern": "^[a-z]{1,60}-[0-9]{1,60}$"}}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(128)]
    answer = server.chat(call_to("commentary to=functions.f7 json", "{}"), tools=tools, tool_choice="required")
    assert answer.status == 200, answer.text
    assert "x-npu-gptoss-warning" not in answer.headers


def test_an_empty_suffix_ends_a_completion(server: Server) -> None:
    server.respond(ANSWER)  # 0.23's scripted engine waits for a first script
    assert server.post("/v1/completions", {"model": NAME, "prompt": "x", "suffix": "", "max_tokens": 1}).status == 200


def test_a_stored_response_cannot_be_deleted(server: Server) -> None:
    """vllm issue 39624: the store grows until the server ends."""
    name = server.respond(ANSWER).json["id"]
    url = f"{server.url}/v1/responses/{name}"
    assert requests.delete(url, timeout=60).json() == {"id": name, "object": "response", "deleted": True}
    assert [ask(url, timeout=60).status_code for ask in (requests.get, requests.delete)] == [404, 404]
    assert server.respond(ANSWER, previous_response_id=name).status == 404


def listed(server: Server, name: str, **query: Any) -> Any:
    return requests.get(f"{server.url}/v1/responses/{name}/input_items", query, timeout=60).json()


def test_input_of_a_stored_response_cannot_be_listed(server: Server) -> None:
    call = {"type": "function_call", "name": "bash", "arguments": "{}", "call_id": "c"}
    output = {"type": "function_call_output", "output": "18", "call_id": "c"}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}], "id": "msg_mine"}
    first = server.respond(input=[said, call, output, USER], instructions="Be brief.").json
    page = listed(server, first["id"], order="asc")
    assert [item["type"] for item in page["data"]] == ["message", "function_call", "function_call_output", "message"]
    assert page["data"][0] == said | {"status": "completed"}
    assert {**page["data"][2], **output} == page["data"][2]
    assert page["data"][3]["content"] == [{"type": "input_text", "text": ANSWER}]
    ids = [item["id"] for item in page["data"]]
    assert len(set(ids)) == 4
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[0], ids[3], False)
    newest = listed(server, first["id"], limit=3)
    assert ([item["id"] for item in newest["data"]], newest["has_more"]) == (ids[:0:-1], True)
    rest = listed(server, first["id"], limit=3, after=newest["last_id"])
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[:1], False)
    empty = listed(server, first["id"], after=rest["last_id"])
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)
    second = server.respond(ANSWER, previous_response_id=first["id"], stream=True).events[-1]["response"]
    want = [*ids, *(item["id"] for item in first["output"])]
    page = listed(server, second["id"], order="asc")
    assert [item["id"] for item in page["data"]][:-1] == want
    third = server.respond(input=[{"type": "item_reference", "id": ids[3]}], enable_response_messages=True).json
    assert "Four." in json.dumps(third["input_messages"])
    assert [item["id"] for item in listed(server, third["id"])["data"]] == ids[3:]


def test_input_of_a_response_that_failed_or_runs_cannot_be_listed(server: Server) -> None:
    for stream in (False, True):
        made = server.respond(ANSWER + ERROR, background=True, stream=stream)
        name = made.events[0]["response"]["id"] if stream else made.json["id"]
        (item,) = listed(server, name)["data"]
        assert item["content"] == [{"type": "input_text", "text": ANSWER + ERROR}]


def test_input_items_that_cannot_be_listed_are_refused(server: Server) -> None:
    name = server.respond(ANSWER).json["id"]
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}):
        assert listed(server, name, **query)["error"]["param"] == next(iter(query))
    requests.delete(f"{server.url}/v1/responses/{name}", timeout=60)
    for unknown in (name, "resp_none", server.respond(ANSWER, store=False).json["id"]):
        assert (listed(server, unknown)["error"]["code"], unknown in listed(server, unknown)["error"]["message"]) == (
            404,
            True,
        )


def test_path_that_the_server_lacks_is_answered_in_another_form(server: Server) -> None:
    """Clients of OpenAI's API read `error`; FastAPI's own answer has `detail`."""
    for method, path, status in (
        ("POST", "/v1/responses/compact", 405),
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/chat/completions", 405),
        ("GET", "/v1/messages", 405),
    ):
        answer = requests.request(method, server.url + path, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, path in error["message"]) == (status, True)
        assert ("allow" in answer.headers) == (status == 405)
        assert answer.headers.get("allow", "") in error["message"]
        if path == "/v1/messages":
            assert answer.json()["type"] == "error"
        else:
            assert (error["code"], error["param"]) == (status, None)


def test_body_behind_an_offer_of_http_2_is_lost(server: Server) -> None:
    """langchain4j issue 3682, spring-ai issue 3775: Java's client offers it in each request."""
    raw = json.dumps({"model": NAME, "messages": [{"role": "user", "content": ANSWER}]}).encode()
    with requests.Session() as client:
        client.headers.update({"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAA"})
        client.headers["Content-Type"] = "application/json"
        for body in (raw, iter([raw[:9], raw[9:]]), raw):  # of a length, and in chunks
            answer = client.post(f"{server.url}/v1/chat/completions", body, timeout=60)
            assert (answer.status_code, len(answer.json()["choices"])) == (200, 1)
