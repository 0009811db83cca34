"""Fields of requests that each release must honour or refuse alike: data of the tests over HTTP."""

from __future__ import annotations

import json
from typing import Any

from tests.frontend.turns import NAMED, WEATHER, flat

USER = {"role": "user", "content": "x"}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT_FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
FORCED = {"tools": [WEATHER], "tool_choice": "required"}
CALLS = WEATHER["function"]["parameters"]

# field of a request -> the field of SamplingParams or of the engine's request, and its value
SAMPLING: dict[str, tuple[Any, str, Any]] = {
    "seed": (3, "seed", 3),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.25, "min_p", 0.25),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.25, "frequency_penalty", 0.25),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "min_tokens": (2, "min_tokens", 2),
    "max_completion_tokens": ("2000", "max_tokens", 2000),
    "max_tokens": (2001, "max_tokens", 2001),
    "max_output_tokens": (2002, "max_tokens", 2002),
    "ignore_eos": (True, "ignore_eos", True),
    "stop_token_ids": ([5], "stop_token_ids", 5),
    "logit_bias": ({"5": 1.0}, "logit_bias", {"5": 1.0}),
    "bad_words": (["spell"], "bad_words", ["spell"]),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "cache_salt": ("s", "cache_salt", "s"),
    "vllm_xargs": ({"a": 1}, "extra_args", {"a": 1}),
}

# a request for a structure, and the structure in the engine's request in one of its kinds; None: none
STRUCTURES: dict[str, tuple[str, dict[str, Any], tuple[str, Any] | None]] = {
    **{
        f"{name} of a {api}": (api, fields, told)
        for api in ("chat", "completions")
        for name, fields, told in (
            ("no format", {"response_format": None}, None),
            ("text", {"response_format": {"type": "text"}}, None),
            ("an object", {"response_format": {"type": "json_object"}}, ("json_object", True)),
            ("a schema", {"response_format": FORMAT}, ("json", SCHEMA)),
            ("structured_outputs", {"structured_outputs": {"regex": "[ab]+"}}, ("regex", "[ab]+")),
            ("guided_json", {"guided_json": SCHEMA}, ("json", SCHEMA)),
            ("guided_regex", {"guided_regex": "[0-9]"}, ("regex", "[0-9]")),
            ("guided_choice", {"guided_choice": ["a1", "b2"]}, ("choice", ["a1", "b2"])),
            ("guided_grammar", {"guided_grammar": 'root ::= "a1"'}, ("grammar", 'root ::= "a1"')),
            ("a null", {"guided_regex": None}, None),
            ("text with a choice", {"response_format": {"type": "text"}, "guided_choice": ["a1"]}, ("choice", ["a1"])),
        )
    },
    "a required call": ("chat", FORCED, ("json", CALLS)),
    "a named call": ("chat", {"tools": [WEATHER], "tool_choice": NAMED}, ("json", CALLS)),
    "a required call and a format": ("chat", FORCED | {"response_format": FORMAT}, ("json", CALLS)),
    "no forced call": ("chat", {"tools": [WEATHER]}, None),
    "a format of a response": ("responses", {"text": {"format": FLAT_FORMAT}}, ("json", SCHEMA)),
    "an object of a response": ("responses", {"text": {"format": {"type": "json_object"}}}, ("json_object", True)),
    "text of a response": ("responses", {"text": {"format": {"type": "text"}}}, None),
    "a required call of a response": (
        "responses",
        {"tools": [flat(WEATHER)], "tool_choice": "required"},
        ("json", CALLS),
    ),
    "a format of a message": ("messages", {"output_config": {"format": FLAT_FORMAT}}, ("json", SCHEMA)),
}


def is_told(structure: dict[str, Any] | None, kind: str, value: Any) -> bool:
    """True if the engine's structure contains this: bare, in calls, or framed as a turn (vLLM 0.33)."""
    if structure is None:
        return False
    if structure.get(kind) == value:
        return True
    if kind == "json":
        return json.dumps(value, sort_keys=True) in json.dumps(_parsed(structure), sort_keys=True)
    if kind == "json_object":
        return "structural_tag" in structure
    texts = value if isinstance(value, list) else [value]  # a choice becomes a grammar
    return all(json.dumps(text)[1:-1] in json.dumps(_parsed(structure)) for text in texts)


def _parsed(structure: dict[str, Any]) -> Any:
    def parsed(name: str, value: Any) -> Any:
        if name == "grammar" and value.startswith("%llguidance"):
            return [json.loads(line.split("%json ")[1]) for line in value.splitlines() if "%json" in line]
        return json.loads(value) if name in ("structural_tag", "json") and isinstance(value, str) else value

    return {name: parsed(name, value) for name, value in structure.items()}


# fields that have no effect, and the path that the refusal names
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"conversation": "c1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ({"background": True, "store": False}, "background"),
    ({"tools": [flat(WEATHER)], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "none"}, "reasoning_effort"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"chat_template_kwargs": {"reasoning_effort": 3}}, "chat_template_kwargs.reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    (FORCED | {"structured_outputs": {"regex": "x"}}, "structured_outputs.regex"),
    (FORCED | {"guided_json": {"type": "null"}}, "guided_json"),
]
BY_THE_ENGINE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": "two"}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"Paris": 1}}, "logit_bias"),
    ({"stop": 3}, "stop"),
    ({"seed": [1]}, "seed"),
    ({"stream": "maybe"}, "stream"),
    ({"logprobs": "x"}, "logprobs"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
     "response_format"),
    ({"stream": True, "guided_regex": "("}, "guided_regex"),
]  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [{"guided_regex": [1]}, {"guided_regex": "("}, {"response_format": {"type": "xml"}}]
