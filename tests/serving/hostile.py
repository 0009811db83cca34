"""Requests that hurt a server, or were answered wrongly, made by hand: data for the admission's tests, soak and fuzz.

Each was seen to end vLLM 0.11.0's engine or its HTTP process, to keep others waiting, to be answered with 500, or to be
answered with 200 and rubbish (`stock` says which). `status` is what the server has to say; `param` the field that the
refusal has to name (None where no field is to blame). A status of 200 marks what looks hostile and has to be served.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.serving.openai import cases

MODEL = "gpt-oss-tiny"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE, INVOCATIONS = "/tokenize", "/detokenize", "/invocations"


@dataclass(frozen=True)
class Hostile:
    name: str
    route: str
    body: bytes  # as sent, with Content-Type: application/json
    status: int
    param: str | None
    stock: str  # "death", "crash" (of the HTTP process), "hang", "500", "200", "400"; "" where it was not asked
    needs: str = "gate"  # who has to say it: the gate alone, a "compiler" of grammars behind it, or the "server"


HOSTILE: list[Hostile] = []


def _add(
    name: str, route: str, body: Any, param: str | None, stock: str, status: int = 400, needs: str = "gate"
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    HOSTILE.append(Hostile(name, route, raw, status, param, stock, needs))


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 4} | fields


def _responses(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "max_output_tokens": 16} | fields


# bodies that are no object, or no JSON, or cannot be read in one way only
_EVERY = (CHAT, COMPLETIONS, RESPONSES, TOKENIZE, DETOKENIZE, INVOCATIONS)
for _route in _EVERY:
    _part = "chat" if _route == CHAT else _route.rsplit("/", 1)[1]
    for _name, _raw in (("list", b"[1]"), ("string", b'"x"'), ("null", b"null"), ("number", b"1")):
        _add(f"{_part}-body-{_name}", _route, _raw, None, "500")
    _add(f"{_part}-not-json", _route, b"{", None, "400")
    _add(f"{_part}-deep", _route, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "500")
    _add(f"{_part}-deep-objects", _route, b'{"a":' * 5000 + b"1" + b"}" * 5000, None, "500")
    _add(f"{_part}-no-utf8", _route, b'{"model": "\xff"}', None, "400")
    _add(f"{_part}-surrogate-in-model", _route, b'{"model": "\\ud800", "prompt": "a", "tokens": [1]}', "model", "500")
    _add(f"{_part}-key-twice", _route, b'{"model": "a", "model": "b"}', "model", "200")
    _add(f"{_part}-digits", _route, b'{"model": ' + b"1" * 5000 + b"}", "model", "500")

# sampling numbers, on both routes that take them
for _route, _make in ((CHAT, _chat), (COMPLETIONS, _completion), (INVOCATIONS, _completion)):
    _part = _route.rsplit("/", 1)[1] if _route != CHAT else "chat"

    def _numbers(
        name: str, param: str, stock: str, *, needs="gate", _route=_route, _make=_make, _part=_part, **fields: Any
    ) -> None:
        _add(f"{_part}-{name}", _route, _make(**fields), param, stock, needs=needs)

    for _field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        for _value in ("NaN", "Infinity", "-Infinity"):
            _raw = json.dumps(_make(**{_field: 0})).replace(f'"{_field}": 0', f'"{_field}": {_value}')
            _add(f"{_part}-{_field}-{_value}", _route, _raw.encode(), _field, "200")
        _numbers(f"{_field}-text-nan", _field, "200", **{_field: "nan"})
        _numbers(f"{_field}-text-inf", _field, "200", **{_field: "1e999"})
    _add(
        f"{_part}-temperature-1e999",
        _route,
        json.dumps(_make(temperature=77)).replace("77", "1e999").encode(),
        "temperature",
        "200",
    )
    _numbers("temperature-huge", "temperature", "200", temperature=1e300)
    _numbers("temperature-negative", "temperature", "400", temperature=-1)
    _numbers("top-p-zero", "top_p", "400", top_p=0)
    _numbers("repetition-penalty-tiny", "repetition_penalty", "200", repetition_penalty=1e-300)
    _numbers("top-k-beyond-int32", "top_k", "500", top_k=2**31)
    _numbers("top-k-2-40", "top_k", "500", top_k=2**40)
    _add(f"{_part}-top-k-2-70", _route, _make(top_k=2**70), "top_k", "500")
    _numbers("n-100000", "n", "hang", n=100_000)
    _numbers("n-zero", "n", "400", n=0)
    _numbers("best-of", "best_of", "400", n=1, best_of=100_000)
    _numbers("priority-huge", "priority", "death", priority=2**40)
    _add(f"{_part}-priority-2-70", _route, _make(priority=2**70), "priority", "death")
    _add(f"{_part}-seed-2-70", _route, _make(seed=2**70), "seed", "400")
    _numbers("min-tokens-beyond-max", "min_tokens", "400", min_tokens=9, max_tokens=4)
    _numbers("min-tokens-huge", "min_tokens", "400", min_tokens=10**9, max_tokens=None)
    _add(f"{_part}-max-tokens-2-70", _route, _make(max_tokens=2**70), "max_tokens", "200")
    for _token in (-1, 201_088, 999_999_999, 2**40):
        _numbers(f"stop-token-{_token}", "stop_token_ids[0]", "death", min_tokens=3, stop_token_ids=[_token])
        _numbers(f"allowed-token-{_token}", "allowed_token_ids[0]", "400", allowed_token_ids=[_token])
        _numbers(f"logit-bias-{_token}", "logit_bias", "400", logit_bias={str(_token): 1})
    _add(f"{_part}-stop-token-2-70", _route, _make(min_tokens=3, stop_token_ids=[2**70]), "stop_token_ids[0]", "death")
    _numbers("no-allowed-token", "allowed_token_ids", "400", allowed_token_ids=[])
    _add(f"{_part}-logit-bias-nan", _route, _make(logit_bias={"7": "nan"}), 'logit_bias["7"]', "200")
    _numbers("stop-empty", "stop", "400", stop="")
    _numbers("stop-empty-in-list", "stop[1]", "400", stop=["a", ""])
    _numbers("stop-1000", "stop", "200", stop=["a"] * 1000)
    _numbers("prompt-logprobs-all", "prompt_logprobs", "200", prompt_logprobs=-1)
    _numbers("prompt-logprobs-text", "prompt_logprobs", "500", prompt_logprobs="1")
    _numbers("prompt-logprobs-huge", "prompt_logprobs", "200", prompt_logprobs=10**6)
    _numbers("request-id-empty", "request_id", "200", request_id="")
    _numbers("request-id-long", "request_id", "200", request_id="a" * 100_000)
    _numbers("request-id-lines", "request_id", "200", request_id="a\nERROR forged\x1b[2J")
    _numbers("truncate-huge", "truncate_prompt_tokens", "400", truncate_prompt_tokens=10**9)
    _numbers("structured-outputs-list", "structured_outputs", "500", structured_outputs=[1])
    _numbers("structured-outputs-text", "structured_outputs", "500", structured_outputs="x")
    _numbers("streamed-allowed-token", "allowed_token_ids[0]", "200", stream=True, allowed_token_ids=[10**9])
    _numbers("streamed-logit-bias", "logit_bias", "200", stream=True, logit_bias={"999999999": 1})
    _numbers("streamed-prompt-logprobs", "prompt_logprobs", "200", stream=True, prompt_logprobs=10**6)

    # structured output
    _numbers("regex-nul", "guided_regex", "crash", needs="compiler", guided_regex="\x00")
    _numbers("regex-property", "guided_regex", "death", needs="compiler", guided_regex="\\p{Q}+")
    _add(f"{_part}-regex-backslash", _route, _make(guided_regex="\\"), None, "death", 200, "compiler")
    _numbers("regex-open", "guided_regex", "400", needs="compiler", guided_regex="(")
    _numbers("regex-long", "guided_regex", "hang", guided_regex="a?" * 100_000)
    _numbers("grammar-empty", "guided_grammar", "death", needs="compiler", guided_grammar="")
    _numbers("grammar-nonsense", "guided_grammar", "400", needs="compiler", guided_grammar="root ::= nothing")
    _numbers("choice-none", "guided_choice", "400", needs="compiler", guided_choice=[])
    _numbers("choice-empty", "guided_choice[0]", "200", guided_choice=[""])
    _numbers("json-no-schema", "guided_json", "400", needs="compiler", guided_json="{")
    _numbers("json-large", "guided_json", "hang", guided_json={"enum": ["x" * 1000] * 1000})
    _numbers(
        "format-without-schema",
        "response_format.json_schema.schema",
        "death",
        response_format={"type": "json_schema", "json_schema": {"name": "x"}},
    )
    _numbers(
        "format-json-schema-missing",
        "response_format.json_schema.schema",
        "500",
        response_format={"type": "json_schema"},
    )
    _numbers(
        "format-structural-tag",
        "response_format",
        "death",
        needs="compiler",
        response_format={
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": {"type": "nothing"}, "end": "</a>"}],
            "triggers": ["<b>"],
        },
    )

# served, and once the death of the engine
_add("chat-format-text", CHAT, _chat(response_format={"type": "text"}), None, "death", 200)
_add("completions-format-text", COMPLETIONS, _completion(response_format={"type": "text"}), None, "200", 200)
_add("invocations-format-text", INVOCATIONS, _chat(response_format={"type": "text"}), None, "death", 200)
_add("responses-format-text", RESPONSES, _responses(text={"format": {"type": "text"}}), None, "200", 200)
# xgrammar alone refuses some of them
for _choice in ("c\nd", 'a"b', "a\\b", "\u00e9\u4e2d", "a\tb"):
    _fields = {"guided_choice": [_choice, "x"]}
    _add(f"chat-choice-{_choice!r}", CHAT, _chat(**_fields), None, "death", 200, "compiler")
    _add(f"completions-choice-{_choice!r}", COMPLETIONS, _completion(**_fields), None, "death", 200, "compiler")

# chat alone
_add("chat-bad-word-empty", CHAT, _chat(bad_words=[""]), "bad_words[0]", "500")
_add("chat-bad-word-blank", CHAT, _chat(bad_words=["a", " \t\u00a0"]), "bad_words[1]", "500")
_add("chat-bad-word-surrogate", CHAT, _chat(bad_words=["\ud800"]), "bad_words[0]", "500")
_add(
    "chat-surrogate-in-content",
    CHAT,
    _chat(messages=[{"role": "user", "content": "\udfff"}]),
    "messages[0].content",
    "400",
)
_add("chat-top-logprobs-text", CHAT, _chat(logprobs=True, top_logprobs="3"), "top_logprobs", "500")
_add("chat-top-logprobs-huge", CHAT, _chat(logprobs=True, top_logprobs=10**6), "top_logprobs", "400")
_add("chat-tools-number", CHAT, _chat(tools=5, tool_choice="auto"), "tools", "500")
_add("chat-tools-of-numbers", CHAT, _chat(tools=[1], tool_choice={"function": {"name": "f"}}), "tools[0]", "500")
_add(
    "chat-tools-empty-object",
    CHAT,
    _chat(tools=[{}], tool_choice={"function": {"name": "f"}}),
    "tools[0].type",
    "500",
    needs="server",
)
_add("chat-template", CHAT, _chat(chat_template="{% for i in range(10**12) %}{% endfor %}"), "chat_template", "200")
_add("chat-template-kwargs", CHAT, _chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs", "200")
_add("chat-no-messages", CHAT, _chat(messages=[]), "messages", "200")
_add("chat-no-messages-no-turn", CHAT, _chat(messages=[], add_generation_prompt=False), "messages", "500")
_add("chat-messages-text", CHAT, _chat(messages="hi"), "messages", "400")
_add("chat-messages-of-numbers", CHAT, _chat(messages=[1]), "messages[0]", "400")
_add("chat-unknown-role", CHAT, _chat(messages=[{"role": "\x1b[2J", "content": "x"}]), None, "400", needs="server")

# completions alone
for _id in (-1, 201_088, 2**31, 2**40):
    _add(f"completions-prompt-{_id}", COMPLETIONS, _completion(prompt=[_id]), "prompt[0]", "500")
    _add(f"completions-prompts-{_id}", COMPLETIONS, _completion(prompt=[[1], [2, _id]]), "prompt[1][1]", "500")
    _add(f"completions-streamed-prompt-{_id}", COMPLETIONS, _completion(prompt=[_id], stream=True), "prompt[0]", "200")
    _add(f"invocations-prompt-{_id}", INVOCATIONS, _completion(prompt=[_id]), "prompt[0]", "500")
_add("completions-prompt-2-70", COMPLETIONS, _completion(prompt=[2**70]), "prompt[0]", "500")
_add("completions-no-prompt", COMPLETIONS, _completion(prompt=[]), "prompt", "500")
_add("completions-empty-prompt", COMPLETIONS, _completion(prompt=["a", ""]), "prompt[1]", "400")
_add("completions-empty-ids", COMPLETIONS, _completion(prompt=[[1], []]), "prompt[1]", "400")
_add("completions-100000-prompts", COMPLETIONS, _completion(prompt=["a"] * 100_000), "prompt", "hang")
_add("completions-prompts-times-n", COMPLETIONS, _completion(prompt=["a"] * 1000, n=100), "n", "hang")
_add("completions-logprobs-text", COMPLETIONS, _completion(logprobs="1"), "logprobs", "500")
_add("completions-logprobs-huge", COMPLETIONS, _completion(logprobs=1000, stream=True), "logprobs", "200")
_add(
    "completions-embeds",
    COMPLETIONS,
    {"model": MODEL, "prompt_embeds": "AAAA", "max_tokens": 4},
    "prompt_embeds",
    "500",
)
_add(
    "invocations-embeds",
    INVOCATIONS,
    {"model": MODEL, "prompt_embeds": "AAAA", "max_tokens": 4},
    "prompt_embeds",
    "500",
)

# responses alone
_add(
    "responses-schema-missing",
    RESPONSES,
    _responses(text={"format": {"type": "json_schema", "name": "x"}}),
    "text.format.schema",
    "400",
)
_add(
    "responses-schema-nonsense",
    RESPONSES,
    _responses(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}),
    "text.format",
    "death",
    needs="compiler",
)
_add("responses-temperature", RESPONSES, _responses(temperature=1e300), "temperature", "200")
_add(
    "responses-top-logprobs",
    RESPONSES,
    _responses(top_logprobs=10**6, include=["message.output_text.logprobs"]),
    "top_logprobs",
    "200",
)
_add("responses-priority", RESPONSES, _responses(priority=2**40), "priority", "death")
_add("responses-request-id", RESPONSES, _responses(request_id="\r\n"), "request_id", "200")
_add("responses-max-output-tokens", RESPONSES, _responses(max_output_tokens=0), "max_output_tokens", "400")
_add("responses-text-list", RESPONSES, _responses(text=[1]), "text", "400")

# the rest
_add(
    "tokenize-template",
    TOKENIZE,
    {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 9**9**9 }}"},
    "chat_template",
    "hang",
)
_add(
    "tokenize-template-kwargs",
    TOKENIZE,
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"chat_template": "{{ 9**9**9 }}"},
    },
    "chat_template_kwargs",
    "hang",
)
for _id in (-1, 2**31, 2**40):
    _add(f"detokenize-{_id}", DETOKENIZE, {"model": MODEL, "tokens": [1, _id]}, "tokens[1]", "500")
_add("detokenize-2-70", DETOKENIZE, {"model": MODEL, "tokens": [2**70]}, "tokens[0]", "500")
_add("scaling", "/scale_elastic_ep", {"new_data_parallel_size": 2, "drain_timeout": 10**9}, None, "hang")

# what no gpt-oss can do was said with status 200
for _route, _input in (
    ("/v1/embeddings", {"input": "a"}),
    ("/pooling", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
):
    _add(f"no-use-for-{_route}", _route, {"model": MODEL} | _input, None, "200", needs="server")

# what the front end refuses on each release
for _route, _make, _api, _refused in (
    (CHAT, _chat, "chat", cases.CHATS),
    (RESPONSES, _responses, "responses", cases.RESPONSES),
):
    for _number, (_fields, _param) in enumerate(_refused):
        _add(f"{_api}-front-end-{_number}-{_param}", _route, _make(**_fields), _param, "", needs="server")
_add(
    "responses-hosted-tool-forced",
    RESPONSES,
    _responses(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}),
    "tool_choice",
    "",
    needs="server",
)
_add("responses-hosted-tool", RESPONSES, _responses(tools=[{"type": "web_search"}]), None, "", 200, needs="server")
