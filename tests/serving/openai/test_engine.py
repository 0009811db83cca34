"""Prompts, sampling and structures that the engine receives on each release of vLLM, over HTTP; and failures."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import requests

from npu_gptoss.frontend import chat, messages, responses
from npu_gptoss.harmony.encoding import Encoder
from npu_gptoss.harmony.vocabulary import VOCABULARY_FILE
from tests.frontend.apis import gathered, of_response
from tests.frontend.conversations import CONVERSATIONS, as_chat, as_response
from tests.frontend.turns import ANSWER, NEXT, THOUGHT, final
from tests.serving.openai.cases import COMPLETIONS, SAMPLING, STRUCTURES, is_told
from tests.serving.openai.conftest import MAX_LEN, NAME, TRAINED, Server
from tests.serving.openai.test_http import USER
from tests.serving.scripted import ERROR, PAUSES
from tests.serving.scripted import SAMPLING as TOLD

pytestmark = [pytest.mark.serving, pytest.mark.slow]


# Structures


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_reaches_the_engine(server: Server, name: str) -> None:
    api, fields, want = STRUCTURES[name]
    told = server.told(fields, api)
    if want is None:
        assert told["structured_outputs"] is None
    else:
        assert is_told(told["structured_outputs"], *want), told["structured_outputs"]
    if server.release == "0.23" and want:  # a completion has no reasoning to wait for
        assert told["reasoning_ended"] == (api == "completions")
    if server.release == "0.33" and want:  # the structure begins with the reasoning
        assert told["reasoning_ended"]


PARTS = {"allOf": [{"type": "object", "properties": {n: {"type": "string"}}, "required": [n]} for n in ("a", "b")]}


@pytest.mark.parametrize(("schema", "backend"), [(PARTS, "guidance"), (PARTS["allOf"][0], "xgrammar")])
def test_structure_goes_to_a_backend_that_holds_it(server: Server, schema: dict[str, Any], backend: str) -> None:
    """xgrammar lets any JSON through for two parts, and says nothing."""
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for api in ("chat", "completions"):
        told = server.told(fields, api)["structured_outputs"]
        assert told["_backend"] == backend
        assert is_told(told, "json", schema), told


@pytest.mark.parametrize("fields", COMPLETIONS)
def test_structure_of_a_completion_that_cannot_be_is_refused(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"model": NAME, "prompt": "x", "max_tokens": 5, **fields})
    assert answer.status == 400, answer.text
    assert server.chat(ANSWER).status == 200


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_field_reaches_the_engine(server: Server, name: str) -> None:
    value, own, want = SAMPLING[name]
    for api, passed in (
        ("chat", chat.PASSED),
        ("responses", responses.PASSED | {"max_output_tokens"}),
        ("messages", messages.PASSED - {"vllm_xargs", "cache_salt"}),
    ):
        if name not in passed:
            continue
        told = server.told({name: value}, api)[own]
        assert want in told if name == "stop_token_ids" else told == want, api


# Options of the server: conftest.py has them


def test_options_are_honoured(server: Server) -> None:
    answer = server.chat(ANSWER, logprobs=True).json
    assert answer["choices"][0]["message"]["role"] == "tutor"
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    first, *_, last = (json.loads(line[6:]) for line in server.chat(ANSWER, stream=True).lines)
    assert first["choices"][0]["delta"]["role"] == "tutor"
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    defaults = server.defaults
    for api in ("chat", "responses", "messages"):
        prompt = server.told(api=api)["prompt"]
        assert f"Reasoning: {defaults.effort or 'medium'}" in prompt
        assert prompt.startswith(f"<|start|>system<|message|>{defaults.identity or 'You are ChatGPT'}")
    user = {"role": "user", "content": f"<|channel|>final<|message|>{TOLD}<|return|>"}
    instructed = server.told({"messages": [{"role": "system", "content": "Be kind."}, user]})["prompt"]
    assert ("developer" in instructed) != defaults.instructions_in_system
    if server.release == "0.33":
        assert "Reasoning: high" in server.told({"reasoning_effort": "max"})["prompt"]
        assert "Reasoning: medium" in server.told({"thinking": {"type": "disabled"}}, "messages")["prompt"]
        assert "metrics" in answer
        assert "metrics" in server.respond(ANSWER).json


def test_outputs_are_logged_where_an_option_asks(server: Server) -> None:
    begin = len(server.log.read_text())
    asks = (server.chat, server.respond, server.message)[: 2 if server.release == "0.23" else 3]  # as vLLM itself
    for number, ask in enumerate(asks):
        for streamed in (False, True):
            said = f"Said {number}{streamed}."
            assert ask(final(said), stream=streamed).status == 200
            log = server.log.read_text()[begin:]
            assert said in log
            assert "aborted" not in log


# Prompts


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversation_is_one_prompt_at_every_entrance(server: Server, encoder: Encoder, name: str) -> None:
    case = CONVERSATIONS[name]
    fields = as_chat(case)
    expected = chat.read(fields, server.defaults).asked.prompt(encoder)
    assert server.chat(return_token_ids=True, max_tokens=1, **fields).json["prompt_token_ids"] == expected
    asked = {name: fields[name] for name in fields if name != "reasoning_effort"}
    asked |= {"chat_template_kwargs": {"reasoning_effort": fields["reasoning_effort"]}}
    assert server.tokenize(**asked) == expected
    assert server.respond(**as_response(case)).json["usage"]["input_tokens"] == len(expected)
    if server.release == "0.11":
        return
    rendered = server.post("/v1/chat/completions/render", {"model": NAME} | fields)
    assert rendered.json["token_ids"] == expected
    if "tools" not in case:  # which no batch has
        batch = {"model": NAME, "max_tokens": 1} | asked | {"messages": [case["messages"]] * 2}
        usage = server.post("/v1/chat/completions/batch", batch).json["usage"]
        assert usage["prompt_tokens"] == 2 * len(expected)


def test_text_is_one_list_of_ids_and_one_text_at_every_entrance(server: Server, encoder: Encoder) -> None:
    text = f"say {TRAINED} of the world, which has more tokens than training left in the file"
    ids = encoder.text(text)
    assert server.tokenize(prompt=text) == ids
    assert server.post("/detokenize", {"model": NAME, "tokens": ids}).json["prompt"] == text
    completed = server.post("/v1/completions", {"model": NAME, "prompt": text, "max_tokens": 99}).json
    assert (completed["choices"][0]["text"], completed["usage"]["prompt_tokens"]) == (text, len(ids))
    written = f"<|channel|>final<|message|>{text}<|return|>"
    assert server.chat(written).json["choices"][0]["message"]["content"] == text
    assert gathered(server.chat(written, stream=True).lines)[0] == text
    assert server.respond(written).json["output"][0]["content"][0]["text"] == text
    assert server.message(written).json["content"][0]["text"] == text


def test_token_count_equals_the_prompts_length(server: Server) -> None:
    count = server.post("/v1/messages/count_tokens", {"model": NAME, "messages": [USER]}).json["input_tokens"]
    assert count == server.chat(messages=[USER]).json["usage"]["prompt_tokens"]
    shown = server.post("/tokenize", {"model": NAME, "messages": [USER], "return_token_strs": True}).json
    assert (shown["count"], len(shown["token_strs"]), shown["token_strs"][0]) == (count, count, "<|start|>")
    first = server.respond(ANSWER).json["id"]
    for fields in ({"input": "hi", "instructions": "Be brief."}, {"input": "hi", "previous_response_id": first}):
        counted = server.post("/v1/responses/input_tokens", {"model": NAME} | fields)
        tokens = server.respond(**fields).json["usage"]["input_tokens"]
        assert counted.json == {"object": "response.input_tokens", "input_tokens": tokens}


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"model": "another", "input": "hi"}, "model", 404),
        ({"input": "hi", "previous_response_id": "resp_none"}, "previous_response_id", 404),
        ({"input": [{"role": "wizard", "content": "hi"}]}, "input[0].role", 400),
    ],
)
def test_count_of_a_response_that_cannot_be_is_refused(server, fields, param, status) -> None:
    """vllm issue 49533."""
    answer = server.post("/v1/responses/input_tokens", {"model": NAME} | fields)
    assert (answer.status, answer.error["param"]) == (status, param)


LONG = "-" * (127 * MAX_LEN)  # for which openai-harmony's tokenizer needs hours
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/tokenize": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": LONG}]] * 2},
}


@pytest.mark.parametrize("route", ROUTES)
def test_server_answers_while_a_long_conversation_is_encoded(server: Server, route: str) -> None:
    def longest_wait() -> tuple[float, float]:
        """The longest of /health, and its limit: on a busy machine everything takes longer."""
        begin = time.monotonic()
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(server.post, route, {"model": NAME} | ROUTES[route]) for _ in range(3)]
            waits = []
            while not all(answer.done() for answer in asked):
                start = time.monotonic()
                requests.get(f"{server.url}/health", timeout=30).raise_for_status()
                waits.append(time.monotonic() - start)
                time.sleep(0.02)
            assert {answer.result().status for answer in asked} <= {200, 400, 404}
        return max(waits), max(1.0, (time.monotonic() - begin) / 2)

    waited = []  # another process may delay one request by a second, but not three
    while len(waited) < 3:
        waited.append(longest_wait())
        if waited[-1][0] < waited[-1][1]:
            return
    raise AssertionError(f"/health waited, of at most: {waited} s")


def test_vocabulary_comes_from_the_checkpoint_without_a_network(server: Server) -> None:
    if server.release != "0.33":  # its library has it
        assert (server.log.parent / "cache/npu_gptoss" / VOCABULARY_FILE).is_file()
    assert not (server.model / VOCABULARY_FILE).exists()


# Failures


@pytest.mark.parametrize(
    "body",
    [b"{not json", b"", b'"x"', b'{"messages": "hello"}', b'{"model": "another", "messages": [{"role": "user"}]}'],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_body_that_is_no_request_is_the_clients_error(server: Server, path: str, body: bytes) -> None:
    answer = server.post(path, body)
    assert 400 <= answer.status < 500, answer.text
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize(("end", "status"), [(ERROR, 500), (PAUSES, 503)])
def test_answer_that_the_engine_cuts_off_looks_like_all_of_it(server: Server, api: str, end: str, status: int) -> None:
    """Stock: what there is by an operator's pause, or a signal on 0.33, is a whole answer, 200."""
    text = THOUGHT + NEXT + "<|channel|>final<|message|>Fo" + end
    ask = server.ask(api)
    whole = ask(text)
    assert whole.status == status
    assert whole.json["error"]["message"]
    streamed = ask(text, stream=True)
    if api == "chat":
        *lines, last = streamed.lines
        assert json.loads(last[6:])["error"]["code"] == status
        assert gathered(lines) == ("Fo", "hm", [], None)
        return
    last = streamed.events[-1]
    if api == "messages":
        assert (last["type"], last["error"]["type"]) == ("error", {500: "api_error", 503: "overloaded_error"}[status])
    else:
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert of_response(last["response"])[:3] == ("Fo", "hm", [])


@pytest.mark.parametrize(
    ("text", "said"), [("word " * 9000, "90"), (" " * (128 * MAX_LEN + 1), "at least 819")], ids=["words", "characters"]
)
def test_too_long_request_has_the_context_error_code(server: Server, text: str, said: str) -> None:
    begin = len(server.log.read_text())
    for answer in (
        server.chat(text, max_tokens=5),
        server.chat(text, max_completion_tokens=5, stream=True),
        server.respond(text, max_output_tokens=5),
        server.post("/v1/completions", {"model": NAME, "prompt": text, "max_tokens": 5}),
        server.post("/invocations", {"messages": [{"role": "user", "content": text}], "max_tokens": 5}),
    ):
        assert answer.status == 400
        assert (answer.error["code"], answer.error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert answer.error["message"].startswith(f"This model's maximum context length is {MAX_LEN} tokens. However, ")
        numbers = answer.error["message"].partition("However")[2]
        assert "Traceback" not in server.log.read_text()[begin:]
        assert said in numbers or "(parameter=input_" in numbers  # vLLM's words, of a later completion
    error = server.message(text, max_tokens=5).json
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize("most", [MAX_LEN, 10 * MAX_LEN])
def test_max_tokens_beyond_the_context_means_what_is_left_of_it(server: Server, most: int) -> None:
    """As with stock vLLM's chats of gpt-oss: OpenAI's own evaluations ask for more than many servers hold."""
    for answer in (
        server.chat("What is 3 + 4?", max_tokens=most),
        server.chat("What is 3 + 4?", max_completion_tokens=most, stream=True),
        server.respond("What is 3 + 4?", max_output_tokens=most),
        server.post("/invocations", {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": most}),
    ):
        assert answer.status == 200, answer.error
    refused = server.message("What is 3 + 4?", max_tokens=most)
    assert refused.status == 400
    assert f"+ {most} > {MAX_LEN}" in refused.json["error"]["message"]


def test_idle_connection_stays_open_longer_than_clients_keep_theirs(server: Server) -> None:
    """Stock vLLM closes it after 5 s, sometimes during the client's next request."""
    with closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)) as connection:
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b""
        time.sleep(7)
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b""


def test_truncated_prompt_is_refused_or_truncation_goes_unsaid(server: Server) -> None:
    history = [{"role": "user", "content": f"old{n} " + "word " * 300} for n in range(60)]
    fields = {"input": [*history, {"role": "user", "content": ANSWER}], "enable_response_messages": True}
    answer = server.respond(**fields, truncation="auto")
    assert answer.status == 200, answer.text
    assert of_response(answer.json)[0] == "Four."
    shown = json.dumps(answer.json["input_messages"])
    read = [n for n in range(60) if f"old{n} " in shown]
    assert read == [*range(read[0], 60)]
    assert 300 * len(read) < answer.json["usage"]["input_tokens"] < 310 * len(read) + 200
    assert (answer.json["truncation"], answer.json["usage"]["input_tokens"] < MAX_LEN) == ("auto", True)
    assert "truncation" in answer.headers["x-npu-gptoss-warning"]
    bodies = [{"model": NAME, "input": fields["input"], "truncation": kind} for kind in (None, "auto")]
    whole, cut = [server.post("/v1/responses/input_tokens", body).json["input_tokens"] for body in bodies]
    assert (whole > MAX_LEN, cut) == (True, answer.json["usage"]["input_tokens"])
    assert server.respond(**fields).error["code"] == "context_length_exceeded"


def test_header_or_field_that_schedules_a_request_is_lost(server: Server) -> None:
    """vLLM 0.33 reads them: replicas behind a router, and servers with --scheduling-policy priority."""
    if server.release != "0.33":
        pytest.skip("of vLLM 0.33")
    text = f"<|channel|>final<|message|>{TOLD}<|return|>"
    body = {"model": NAME, "input": text}
    for fields, headers in (({"session_id": "s1"}, {}), ({}, {"X-Session-ID": "s1"})):
        told = server.post("/v1/responses", body | fields, **headers, **{"X-Vllm-Priority": "3"}).json
        told = json.loads(told["output"][0]["content"][0]["text"])
        assert (told["session_id"], told["priority"]) == ("s1", 3)


def test_clients_own_tag_becomes_another_grammar(server: Server) -> None:
    if server.release != "0.33":
        pytest.skip("of vLLM 0.33")
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    told = server.told({"structured_outputs": {"structural_tag": json.dumps(tag)}})["structured_outputs"]
    assert json.dumps(schema) in told["structural_tag"]
