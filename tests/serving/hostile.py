"""Requests that hurt a server, made by hand: data for the tests of admission, the endurance runs and the fuzz.

Each was seen to end vLLM 0.11.0's engine or its HTTP process, to keep others waiting, or to be answered with 500 or
with 200 and rubbish. A few only look hostile: their status is 200, and the server has to serve them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.serving.openai import cases

MODEL = "gpt-oss-tiny"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENIZE, DETOKENIZE, INVOCATIONS = "/tokenize", "/detokenize", "/invocations"
ADMISSION, COMPILER, SERVER = "admission", "compiler", "server"


@dataclass(frozen=True)
class Hostile:
    """`status`: of the right answer. `param`: the field that a refusal names; None where no field is to blame.

    `needs`: the part that refuses it: admission alone, a compiler of grammars behind it, or the whole server.
    """

    name: str
    route: str
    body: bytes  # as sent, with Content-Type: application/json
    status: int
    param: str | None
    needs: str = ADMISSION


HOSTILE: list[Hostile] = []


def _add(name: str, route: str, body: Any, param: str | None, status: int = 400, needs: str = ADMISSION) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    HOSTILE.append(Hostile(name, route, raw, status, param, needs))


def _body(route: str, **fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} if route == CHAT else {}
    if route in (COMPLETIONS, INVOCATIONS):
        said = {"prompt": "hello", "max_tokens": 4}
    if route == RESPONSES:
        said = {"input": "hi", "max_output_tokens": 16}
    return {"model": MODEL} | said | fields


def _prefix(route: str) -> str:
    return "chat" if route == CHAT else route.rsplit("/", 1)[1]


# bodies that are no object, or no JSON, or cannot be read in one way only
_BODIES: list[tuple[str, bytes, str | None]] = [
    ("body-list", b"[1]", None),
    ("body-string", b'"x"', None),
    ("body-null", b"null", None),
    ("body-number", b"1", None),
    ("not-json", b"{", None),
    ("deep", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ("deep-objects", b'{"a":' * 5000 + b"1" + b"}" * 5000, None),
    ("no-utf8", b'{"model": "\xff"}', None),
    ("surrogate-in-model", b'{"model": "\\ud800", "prompt": "a", "tokens": [1]}', "model"),
    ("key-twice", b'{"model": "a", "model": "b"}', "model"),
    ("digits", b'{"model": ' + b"1" * 5000 + b"}", "model"),
]
for _route in (CHAT, COMPLETIONS, RESPONSES, TOKENIZE, DETOKENIZE, INVOCATIONS):
    for _name, _raw, _param in _BODIES:
        _add(f"{_prefix(_route)}-{_name}", _route, _raw, _param)

_TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {"type": "nothing"}, "end": "</a>"}],
        "triggers": ["<b>"]}  # fmt: skip
_NO_SCHEMA = "response_format.json_schema.schema"
# name, the field to blame, and the fields: of a chat and of a completion
_BOTH: list[tuple[str, str, dict[str, Any]]] = [
    ("temperature-huge", "temperature", {"temperature": 1e300}),
    ("temperature-negative", "temperature", {"temperature": -1}),
    ("top-p-zero", "top_p", {"top_p": 0}),
    ("repetition-penalty-tiny", "repetition_penalty", {"repetition_penalty": 1e-300}),
    ("top-k-beyond-int32", "top_k", {"top_k": 2**31}),
    ("top-k-2-40", "top_k", {"top_k": 2**40}),
    ("top-k-2-70", "top_k", {"top_k": 2**70}),
    ("n-100000", "n", {"n": 100_000}),
    ("n-zero", "n", {"n": 0}),
    ("best-of", "best_of", {"n": 1, "best_of": 100_000}),
    ("priority-huge", "priority", {"priority": 2**40}),
    ("priority-2-70", "priority", {"priority": 2**70}),
    ("seed-2-70", "seed", {"seed": 2**70}),
    ("min-tokens-beyond-max", "min_tokens", {"min_tokens": 9, "max_tokens": 4}),
    ("min-tokens-huge", "min_tokens", {"min_tokens": 10**9, "max_tokens": None}),
    ("max-tokens-2-70", "max_tokens", {"max_tokens": 2**70}),
    *(
        row
        for token in (-1, 201_088, 999_999_999, 2**40)
        for row in (
            (f"stop-token-{token}", "stop_token_ids[0]", {"min_tokens": 3, "stop_token_ids": [token]}),
            (f"allowed-token-{token}", "allowed_token_ids[0]", {"allowed_token_ids": [token]}),
            (f"logit-bias-{token}", "logit_bias", {"logit_bias": {str(token): 1}}),
        )
    ),
    ("stop-token-2-70", "stop_token_ids[0]", {"min_tokens": 3, "stop_token_ids": [2**70]}),
    ("no-allowed-token", "allowed_token_ids", {"allowed_token_ids": []}),
    ("logit-bias-nan", 'logit_bias["7"]', {"logit_bias": {"7": "nan"}}),
    ("stop-empty", "stop", {"stop": ""}),
    ("stop-empty-in-list", "stop[1]", {"stop": ["a", ""]}),
    ("stop-1000", "stop", {"stop": ["a"] * 1000}),
    ("prompt-logprobs-all", "prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt-logprobs-text", "prompt_logprobs", {"prompt_logprobs": "1"}),
    ("prompt-logprobs-huge", "prompt_logprobs", {"prompt_logprobs": 10**6}),
    ("request-id-empty", "request_id", {"request_id": ""}),
    ("request-id-long", "request_id", {"request_id": "a" * 100_000}),
    ("request-id-lines", "request_id", {"request_id": "a\nERROR forged\x1b[2J"}),
    ("truncate-huge", "truncate_prompt_tokens", {"truncate_prompt_tokens": 10**9}),
    ("structured-outputs-list", "structured_outputs", {"structured_outputs": [1]}),
    ("structured-outputs-text", "structured_outputs", {"structured_outputs": "x"}),
    ("streamed-allowed-token", "allowed_token_ids[0]", {"stream": True, "allowed_token_ids": [10**9]}),
    ("streamed-logit-bias", "logit_bias", {"stream": True, "logit_bias": {"999999999": 1}}),
    ("streamed-prompt-logprobs", "prompt_logprobs", {"stream": True, "prompt_logprobs": 10**6}),
    ("regex-long", "guided_regex", {"guided_regex": "a?" * 100_000}),
    ("choice-empty", "guided_choice[0]", {"guided_choice": [""]}),
    ("json-large", "guided_json", {"guided_json": {"enum": ["x" * 1000] * 1000}}),
]
# the same, which the front end or a compiler of grammars has to refuse
_COMPILED: list[tuple[str, str, dict[str, Any]]] = [
    ("regex-nul", "guided_regex", {"guided_regex": "\x00"}),
    ("regex-property", "guided_regex", {"guided_regex": "\\p{Q}+"}),
    ("regex-open", "guided_regex", {"guided_regex": "("}),
    ("grammar-empty", "guided_grammar", {"guided_grammar": ""}),
    ("grammar-nonsense", "guided_grammar", {"guided_grammar": "root ::= nothing"}),
    ("choice-none", "guided_choice", {"guided_choice": []}),
    ("json-no-schema", "guided_json", {"guided_json": "{"}),
    ("format-structural-tag", "response_format", {"response_format": _TAG}),
    ("format-without-schema", _NO_SCHEMA, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("format-json-schema-missing", _NO_SCHEMA, {"response_format": {"type": "json_schema"}}),
]
for _route in (CHAT, COMPLETIONS, INVOCATIONS):
    _part = _prefix(_route)
    for _field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        for _value in ("NaN", "Infinity", "-Infinity", *(["1e999"] if _field == "temperature" else [])):
            _raw = json.dumps(_body(_route, **{_field: 77})).replace("77", _value).encode()
            _add(f"{_part}-{_field}-{_value}", _route, _raw, _field)
        for _name, _value in (("nan", "nan"), ("inf", "1e999")):
            _add(f"{_part}-{_field}-text-{_name}", _route, _body(_route, **{_field: _value}), _field)
    for _needs, _rows in ((ADMISSION, _BOTH), (COMPILER, _COMPILED)):
        for _name, _param, _fields in _rows:
            _add(f"{_part}-{_name}", _route, _body(_route, **_fields), _param, needs=_needs)
    _add(f"{_part}-regex-backslash", _route, _body(_route, guided_regex="\\"), None, 200, COMPILER)
    _text = {"response_format": {"type": "text"}}  # served, and once the death of the engine
    _add(f"{_part}-format-text", _route, _body(CHAT if _route == INVOCATIONS else _route, **_text), None, 200)
_add("responses-format-text", RESPONSES, _body(RESPONSES, text={"format": {"type": "text"}}), None, 200)
for _choice in ("c\nd", 'a"b', "a\\b", "\u00e9\u4e2d", "a\tb"):  # xgrammar alone refuses some of them
    for _route in (CHAT, COMPLETIONS):
        _name = f"{_prefix(_route)}-choice-{_choice!r}"
        _add(_name, _route, _body(_route, guided_choice=[_choice, "x"]), None, 200, COMPILER)

_USER = {"role": "user", "content": "a"}
_SCHEMA = {"type": "json_schema", "name": "x"}
# route, name, the field to blame, the fields
_ONE: list[tuple[str, str, str | None, dict[str, Any]]] = [
    (CHAT, "bad-word-empty", "bad_words[0]", {"bad_words": [""]}),
    (CHAT, "bad-word-blank", "bad_words[1]", {"bad_words": ["a", " \t\u00a0"]}),
    (CHAT, "bad-word-surrogate", "bad_words[0]", {"bad_words": ["\ud800"]}),
    (CHAT, "surrogate-in-content", "messages[0].content", {"messages": [{"role": "user", "content": "\udfff"}]}),
    (CHAT, "top-logprobs-text", "top_logprobs", {"logprobs": True, "top_logprobs": "3"}),
    (CHAT, "top-logprobs-huge", "top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    (CHAT, "tools-number", "tools", {"tools": 5, "tool_choice": "auto"}),
    (CHAT, "tools-of-numbers", "tools[0]", {"tools": [1], "tool_choice": {"function": {"name": "f"}}}),
    (CHAT, "template", "chat_template", {"chat_template": "{% for i in range(10**12) %}{% endfor %}"}),
    (CHAT, "template-kwargs", "chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    (CHAT, "no-messages", "messages", {"messages": []}),
    (CHAT, "no-messages-no-turn", "messages", {"messages": [], "add_generation_prompt": False}),
    (CHAT, "messages-text", "messages", {"messages": "hi"}),
    (CHAT, "messages-of-numbers", "messages[0]", {"messages": [1]}),
    *(
        row
        for token in (-1, 201_088, 2**31, 2**40)
        for row in (
            (COMPLETIONS, f"prompt-{token}", "prompt[0]", {"prompt": [token]}),
            (COMPLETIONS, f"prompts-{token}", "prompt[1][1]", {"prompt": [[1], [2, token]]}),
            (COMPLETIONS, f"streamed-prompt-{token}", "prompt[0]", {"prompt": [token], "stream": True}),
            (INVOCATIONS, f"prompt-{token}", "prompt[0]", {"prompt": [token]}),
        )
    ),
    (COMPLETIONS, "prompt-2-70", "prompt[0]", {"prompt": [2**70]}),
    (COMPLETIONS, "no-prompt", "prompt", {"prompt": []}),
    (COMPLETIONS, "empty-prompt", "prompt[1]", {"prompt": ["a", ""]}),
    (COMPLETIONS, "empty-ids", "prompt[1]", {"prompt": [[1], []]}),
    (COMPLETIONS, "100000-prompts", "prompt", {"prompt": ["a"] * 100_000}),
    (COMPLETIONS, "prompts-times-n", "n", {"prompt": ["a"] * 1000, "n": 100}),
    (COMPLETIONS, "logprobs-text", "logprobs", {"logprobs": "1"}),
    (COMPLETIONS, "logprobs-huge", "logprobs", {"logprobs": 1000, "stream": True}),
    (COMPLETIONS, "embeds", "prompt_embeds", {"prompt_embeds": "AAAA"}),
    (INVOCATIONS, "embeds", "prompt_embeds", {"prompt_embeds": "AAAA"}),
    (RESPONSES, "temperature", "temperature", {"temperature": 1e300}),
    (RESPONSES, "top-logprobs", "top_logprobs", {"top_logprobs": 10**6, "include": ["message.output_text.logprobs"]}),
    (RESPONSES, "priority", "priority", {"priority": 2**40}),
    (RESPONSES, "request-id", "request_id", {"request_id": "\r\n"}),
    (RESPONSES, "max-output-tokens", "max_output_tokens", {"max_output_tokens": 0}),
    (RESPONSES, "text-list", "text", {"text": [1]}),
    (TOKENIZE, "template", "chat_template", {"messages": [_USER], "chat_template": "{{ 9**9**9 }}"}),
    (TOKENIZE, "template-kwargs", "chat_template_kwargs",
     {"messages": [_USER], "chat_template_kwargs": {"chat_template": "{{ 9**9**9 }}"}}),
    *((DETOKENIZE, f"{token}", "tokens[1]", {"tokens": [1, token]}) for token in (-1, 2**31, 2**40)),
    (DETOKENIZE, "2-70", "tokens[0]", {"tokens": [2**70]}),
]  # fmt: skip
for _route, _name, _param, _fields in _ONE:
    _add(f"{_prefix(_route)}-{_name}", _route, _body(_route, **_fields), _param)
_add("scaling", "/scale_elastic_ep", {"new_data_parallel_size": 2, "drain_timeout": 10**9}, None)

# what the server refuses, as no gpt-oss can do it, or as the front end cannot on any release
_HOSTED = {"tools": [{"type": "web_search"}]}
_OF_SERVER: list[tuple[str, str, str | None, dict[str, Any]]] = [
    (CHAT, "chat-tools-empty-object", "tools[0].type", {"tools": [{}], "tool_choice": {"function": {"name": "f"}}}),
    (CHAT, "chat-unknown-role", None, {"messages": [{"role": "\x1b[2J", "content": "x"}]}),
    ("/v1/embeddings", "no-use-for-/v1/embeddings", None, {"input": "a"}),
    ("/pooling", "no-use-for-/pooling", None, {"input": "a"}),
    ("/classify", "no-use-for-/classify", None, {"input": "a"}),
    ("/score", "no-use-for-/score", None, {"text_1": "a", "text_2": "b"}),
    ("/rerank", "no-use-for-/rerank", None, {"query": "a", "documents": ["b"]}),
    *((CHAT, f"chat-front-end-{n}-{param}", param, fields) for n, (fields, param) in enumerate(cases.CHATS)),
    *((RESPONSES, f"responses-front-end-{n}-{p}", p, fields) for n, (fields, p) in enumerate(cases.RESPONSES)),
    (RESPONSES, "responses-schema-missing", "text.format.schema", {"text": {"format": _SCHEMA}}),
    (RESPONSES, "responses-hosted-tool-forced", "tool_choice", _HOSTED | {"tool_choice": {"type": "web_search"}}),
]
for _route, _name, _param, _fields in _OF_SERVER:
    _add(_name, _route, _body(_route, **_fields), _param, needs=SERVER)
_add("responses-hosted-tool", RESPONSES, _body(RESPONSES, **_HOSTED), None, 200, SERVER)
_text = {"format": _SCHEMA | {"schema": {"type": "nothing"}}}
_add("responses-schema-nonsense", RESPONSES, _body(RESPONSES, text=_text), "text.format", needs=COMPILER)
