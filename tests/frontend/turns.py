"""Turns that a model may write, with the answer that a client of chat completions must get.

Each has a harmony text, the request's fields besides its messages, and the answer: content, reasoning, calls and finish
reason. tests/frontend runs them through the front end alone, tests/serving/openai through each release's server.
"""

from __future__ import annotations

from typing import Any

Answer = tuple[str, str, list[list[str]], str]  # content, reasoning, [[function, arguments]], finish reason

THOUGHT, NEXT = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant"
FOUR = NEXT + "<|channel|>final<|message|>Four.<|return|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
TWO_CALLS = CALL.replace("<|call|>", "<|end|>") + NEXT + CALL
PARIS = ["get_weather", '{"city":"Paris"}']
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"cmd": {}}}}}
PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {"x": {}}}}}


ANSWER = THOUGHT + FOUR
FINAL_FOUR: Answer = ("Four.", "", [], "stop")
THOUGHT_FOUR: Answer = ("Four.", "hm", [], "stop")
OF_BASH, OF_WEATHER, LS = {"tools": [BASH]}, {"tools": [WEATHER]}, '{"cmd":"ls"}'


def flat(value: Any) -> Any:
    """A tool or a tool choice of chat as /v1/responses spells it."""
    return {"type": "function", **value["function"]} if isinstance(value, dict) and "function" in value else value


def final(text: str) -> str:
    return f"<|channel|>final <|constrain|>json<|message|>{text}<|return|>"


def call_to(header: str, arguments: str = "{}") -> str:
    return f"<|channel|>{header}<|message|>{arguments}<|call|>"


def called(function: str, arguments: str = "{}", reasoning: str = "") -> Answer:
    return "", reasoning, [[function, arguments]], "tool_calls"


TURNS: dict[str, tuple[str, dict[str, Any], Answer]] = {
    "reasoning and answer": (THOUGHT + FOUR, {}, THOUGHT_FOUR),
    "tokens behind the end": (THOUGHT + FOUR + "<|return|> and so on", {}, ("Four.", "hm", [], "length")),
    "an end of text behind the end": (
        THOUGHT + FOUR.replace("<|return|>", "<|end|><|endoftext|>"),
        {},
        ("Four.", "hm", [], "length"),
    ),
    "an end of text in the answer": (
        THOUGHT + FOUR.replace("<|return|>", "<|endoftext|>"),
        {},
        ("Four.", "hm", [], "length"),
    ),
    "words behind the channel": ("<|channel|>final x y z<|message|>Four.<|return|>", {}, FINAL_FOUR),
    "an unknown channel": ("<|channel|>comment<|message|>Four.<|return|>", {}, FINAL_FOUR),
    "no channel": ("<|message|>Four.<|return|>", {}, FINAL_FOUR),
    "two reasonings": (THOUGHT + NEXT + THOUGHT + FOUR, {}, ("Four.", "hm\nhm", [], "stop")),
    "a preamble": ("<|channel|>commentary<|message|>I look.<|end|>" + FOUR, {}, ("I look.\nFour.", "", [], "stop")),
    "a call": (CALL, OF_WEATHER, ("", "", [PARIS], "tool_calls")),
    "two calls": (TWO_CALLS, OF_WEATHER, ("", "", [PARIS, PARIS], "tool_calls")),
    "a call without arguments": (CALL.replace('{"city":"Paris"}', ""), OF_WEATHER, called("get_weather")),
    "a tool that is not offered": (call_to("commentary to=python", "1+1"), {}, ("", "1+1", [], "stop")),
    "a cut answer": (THOUGHT + NEXT + "<|channel|>final<|message|>Fou", {}, ("Fou", "hm", [], "length")),
    "a stop string": (THOUGHT + FOUR, {"stop": ["ur", "hm"]}, ("Fo", "hm", [], "stop")),
    "a required call": (
        THOUGHT + NEXT + final('[{"name":"get_weather","parameters":{"city":"Paris"}}]'),
        {"tools": [WEATHER], "tool_choice": "required"},
        ("", "hm", [PARIS], "tool_calls"),
    ),
    "a named call": (
        final('{"city":"Paris"}'),
        {"tools": [WEATHER], "tool_choice": NAMED},
        ("", "", [PARIS], "tool_calls"),
    ),
    "a call that is not wanted": (
        THOUGHT + NEXT + CALL,
        {"tools": [WEATHER], "tool_choice": "none"},
        ('{"city":"Paris"}', "hm", [], "stop"),
    ),
    "a cut call": (CALL[: CALL.index("ris")], OF_WEATHER, ("", "", [["get_weather", '{"city":"Pa']], "length")),
    "reasoning that is not wanted": (THOUGHT + FOUR, {"include_reasoning": False}, FINAL_FOUR),
    # and of public reports
    "control tokens behind the name": (
        THOUGHT + NEXT + call_to("commentary to=functions.bash<|channel|>commentary<|constrain|>json", LS),
        OF_BASH,
        called("bash", LS, "hm"),
    ),
    "dashes behind the name": (
        call_to("commentary to=functions.bash––commentary <|constrain|>json", LS),
        OF_BASH,
        called("bash", LS),
    ),
    "an empty name": (call_to("commentary to=functions. <|constrain|>json"), OF_BASH, ("", "{}", [], "stop")),
    "a bare name": (call_to("commentary to=bash <|constrain|>json", LS), OF_BASH, called("bash", LS)),
    "the client's own python": (
        call_to("commentary to=python <|constrain|>json", '{"x":1}'),
        {"tools": [PYTHON]},
        called("python", '{"x":1}'),
    ),
    "an answer to a recipient": ("<|channel|>final to=user<|message|>Four.<|return|>", {}, FINAL_FOUR),
    "no header at all": ("Four.<|return|>", {}, FINAL_FOUR),
    "a header that never ends": (
        THOUGHT + NEXT + "<|channel|>analysis need more.<|return|>",
        {},
        ("", "hm\nneed more.", [], "stop"),
    ),
    "text between messages": (THOUGHT + "Four.<|return|>", {}, THOUGHT_FOUR),
    "a made-up user": (
        "<|channel|>final<|message|>Four.<|end|><|start|>user<|message|>More?<|end|>",
        {},
        ("Four.", "", [], "length"),
    ),
    "a made-up result": (
        THOUGHT + "<|start|>functions.bash to=assistant<|channel|>commentary<|message|>file<|end|>" + FOUR,
        {},
        THOUGHT_FOUR,
    ),
    "a call on the analysis channel": (call_to("analysis to=functions.bash code", LS), OF_BASH, called("bash", LS)),
    "a malformed call": (
        call_to("commentary to=functions.bash <|constrain|>json", '{"cmd":"ls'),
        OF_BASH,
        called("bash", '{"cmd":"ls'),
    ),
    "no end before the answer": (THOUGHT.removesuffix("<|end|>") + FOUR, {}, THOUGHT_FOUR),
    "neither end nor start before the answer": (
        THOUGHT.removesuffix("<|end|>") + FOUR.removeprefix(NEXT),
        {},
        THOUGHT_FOUR,
    ),
    "no end before a call": (
        THOUGHT.removesuffix("<|end|>") + NEXT + CALL,
        OF_WEATHER,
        ("", "hm", [PARIS], "tool_calls"),
    ),
    "a second beginning of the text": ("<|channel|>final<|message|>Fo<|message|>ur.<|return|>", {}, FINAL_FOUR),
    "two channels": ("<|channel|>analysis<|channel|>final<|message|>Four.<|return|>", {}, FINAL_FOUR),
    "a call of itself": (call_to("commentary to=assistant<|channel|>analysis", LS), OF_BASH, ("", LS, [], "stop")),
    "a namespace that is not harmony's": (
        call_to("commentary to=tools.bash <|constrain|>json"),
        OF_BASH,
        called("bash"),
    ),
    "harmony's namespace twice": (
        call_to("commentary to=functions.functions.bash <|constrain|>json"),
        OF_BASH,
        called("bash"),
    ),
    "a name with other letters": (
        call_to("commentary to=functions.fs/read:2 <|constrain|>json"),
        {"tools": [{"type": "function", "function": BASH["function"] | {"name": "fs/read:2"}}]},
        ("", "", [["fs/read:2", "{}"]], "tool_calls"),
    ),
    "noise before the first message": (
        "<|channel|>commentary?commentary?<|end|>" + NEXT + THOUGHT + FOUR,
        {},
        ("Four.", "?commentary?\nhm", [], "stop"),
    ),
    "a thought without a header": ("I hum.<|end|>" + NEXT + THOUGHT + FOUR, {}, ("Four.", "I hum.\nhm", [], "stop")),
    "a channel that runs into the text": (
        THOUGHT + NEXT + "<|channel|>final__FOUR__<|return|>",
        {},
        ("__FOUR__", "hm", [], "stop"),
    ),
    "a name in the place of the channel": (call_to("bash"), OF_BASH, called("bash")),
    "a name behind the channel": (call_to("commentary bash <|constrain|>json"), OF_BASH, called("bash")),
    "a name in the place of the role": (
        THOUGHT + "<|start|>bash" + call_to("commentary"),
        OF_BASH,
        called("bash", reasoning="hm"),
    ),
    "a channel behind the name": (call_to("commentary to=functions.bash..commentary json"), OF_BASH, called("bash")),
    "nothing": ("<|return|>", {}, ("", "", [], "stop")),
}
