"""Honest requests of the soak: each has one right answer, taken without other load.

A request is a route, a body, and a reader that extracts the part that is the same each time. Streamed ones are
compared with the answer of their unstreamed twin: nothing may be lost on the way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from npu_gptoss.serving.releases import here
from tests.serving.hostile import CHAT, COMPLETIONS, RESPONSES
from tests.soak.server import NAME

Body = dict[str, Any]
Answer = dict[str, Any]  # what is compared
Reader = Callable[[list[Any]], Answer]  # of the pieces of a reply

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CITIES = ("Paris", "London", "Rome", "Oslo", "Berlin", "Tokyo", "Madrid", "Cairo")
SEASONS = ["spring", "autumn"]
# closed values: a free number or text could go on until max_tokens
OBJECT = {
    "type": "object",
    "properties": {"season": {"enum": SEASONS}, "even": {"type": "boolean"}},
    "required": ["season", "even"],
    "additionalProperties": False,
}
# In vLLM 0.33 disable_any_whitespace does not reach the schema of a chat, and in any space the tiny model loses itself.
SCHEMA = OBJECT if here().name == "0.11" else {"enum": SEASONS}
WORDS = 201_000  # below every special token
TOKEN_IDS = {"return_token_ids": True}  # of a chat's or a completion's body
VARIANTS = 12  # of each kind: so many answers are taken before the soak


class Wrong(Exception):
    """Raised for a wrong reply, in words."""


@dataclass(frozen=True)
class Honest:
    """`key`: equal for requests with one answer. `read`: the pieces of the reply (one, or a stream's) -> Answer."""

    kind: str
    key: str
    route: str
    body: Body
    read: Reader

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


def _body(**fields: Any) -> Body:
    return {"model": NAME, "temperature": 0, **fields}


def _chat(text: str, **fields: Any) -> Body:
    return _body(messages=[{"role": "user", "content": text}], max_tokens=120, **fields)


def _sum(seed: int) -> str:
    return f"What is {seed % 9 + 1} + {seed % 7 + 2}?"


def _city(seed: int) -> str:
    return CITIES[seed % len(CITIES)]


def _facts(seed: int) -> str:
    colour, number = ("red", "green", "blue")[seed % 3], seed % 80 + 10
    facts = " ".join(f"The river code is {n}." for n in range(40))
    return f"The {colour} code is {number}. {facts} The pink code is 5. What is the pink code?"


@dataclass(frozen=True)
class Said:
    """The token ids of a prompt and of its answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def said(pieces: list[Any]) -> Said | None:
    """Of a reply that was asked for them by TOKEN_IDS; None where a route has none to give, as Responses."""
    choices = [choice for piece in pieces for choice in piece.get("choices", ())]
    prompt = next((ids for place in (*pieces, *choices) if (ids := place.get("prompt_token_ids"))), None)
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return Said(tuple(prompt), tuple(tokens)) if prompt and tokens else None


# --- readers: the pieces of a reply -> what is compared ---


def _of_message(message: dict[str, Any], finish: str) -> Answer:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], _arguments(function["arguments"])) for function in functions]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "finish": finish,
    }


def _arguments(written: str) -> str:
    """Normalises them: vLLM 0.33 rewrites the arguments of a whole answer, and streams the model's text."""
    try:
        return json.dumps(json.loads(written), sort_keys=True)
    except ValueError:  # cut off
        return written


def _only(finishes: list[str]) -> str:
    if len(finishes) != 1:
        raise Wrong(f"a stream has one finish_reason, this one has {finishes}")
    return finishes[0]


def read_chat(pieces: list[Any]) -> Answer:
    (choice,) = pieces[0]["choices"]
    return _of_message(choice["message"], choice["finish_reason"])


def read_chat_stream(pieces: list[Any]) -> Answer:
    """The deltas put together as a client does; a stream has one finish reason."""
    text: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, str]] = {}
    finishes = []
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        for name in text:
            text[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls") or []:
            function = call.get("function") or {}
            place = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            place["name"] += function.get("name") or ""
            place["arguments"] += function.get("arguments") or ""
        finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
    written = {**text, "tool_calls": [{"function": call} for _, call in sorted(calls.items())]}
    return _of_message(written, _only(finishes))


def read_logprobs(pieces: list[Any]) -> Answer:
    """As a chat; every token of the answer has its log-probability, and the chosen one is the likeliest."""
    (choice,) = pieces[0]["choices"]
    tokens = choice["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    if text != choice["message"]["content"]:
        raise Wrong(f"the content is {choice['message']['content']!r}, the log-probabilities are {text!r}'s")
    for token in tokens:
        best = max(other["logprob"] for other in token["top_logprobs"])
        if token["logprob"] < best - 1e-6:
            raise Wrong(f"greedy took {token['token']!r} at {token['logprob']}, {best} was there")
    return read_chat(pieces)


def read_samples(pieces: list[Any]) -> Answer:
    """n sampled choices: each is there, ended, and not empty. Their texts are chance."""
    choices = pieces[0]["choices"]
    for choice in choices:
        message = choice["message"]
        if choice["finish_reason"] not in ("stop", "length", "tool_calls"):
            raise Wrong(f"finish_reason {choice['finish_reason']}")
        if not (message.get("content") or message.get("reasoning_content") or message.get("tool_calls")):
            raise Wrong("an empty choice")
    return {"indices": sorted(choice["index"] for choice in choices)}


def read_structured(pieces: list[Any]) -> Answer:
    """As a chat; its content fits the schema."""
    answer = read_chat(pieces)
    found = json.loads(answer["content"])
    if SCHEMA is not OBJECT:
        fits = found in SEASONS
    else:
        fits = set(found) == set(OBJECT["properties"]) and isinstance(found["even"], bool)
    if not fits:
        raise Wrong(f"against the schema: {answer['content'][:100]!r}")
    return answer


def read_completion(pieces: list[Any]) -> Answer:
    (choice,) = pieces[0]["choices"]
    return {"text": choice["text"], "finish": choice["finish_reason"], "usage": _count(pieces[0])}


def read_completion_stream(pieces: list[Any]) -> Answer:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return {"text": "".join(c["text"] for c in choices), "finish": _only(finishes), "usage": _count(pieces[-1])}


def _count(piece: dict[str, Any]) -> list[int]:
    usage = piece["usage"]
    return [usage["prompt_tokens"], usage["completion_tokens"]]


def read_response(pieces: list[Any]) -> Answer:
    return _of_response(pieces[0])


def _of_response(response: dict[str, Any]) -> Answer:
    items = []
    for item in response["output"]:
        if item["type"] == "function_call":
            items.append(["call", item["name"], item["arguments"]])
        else:
            items.append([item["type"], "".join(part.get("text", "") for part in item.get("content") or [])])
    return {"status": response["status"], "items": items}


def read_response_stream(pieces: list[Any]) -> Answer:
    """The final object; the deltas have to add up to it."""
    if pieces[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise Wrong(f"the last event is {pieces[-1]['type']}")
    numbers = [piece["sequence_number"] for piece in pieces]
    if numbers != sorted(set(numbers)):
        raise Wrong("sequence numbers do not rise")
    answer = _of_response(pieces[-1]["response"])
    text = "".join(piece["delta"] for piece in pieces if piece["type"] == "response.output_text.delta")
    said = "".join(item[1] for item in answer["items"] if item[0] == "message")
    if text != said:
        raise Wrong(f"the deltas say {text[:80]!r}, the final object says {said[:80]!r}")
    arguments = "".join(p["delta"] for p in pieces if p["type"] == "response.function_call_arguments.delta")
    called = "".join(item[2] for item in answer["items"] if item[0] == "call")
    if arguments != called:
        raise Wrong(f"the deltas call with {arguments[:80]!r}, the final object with {called[:80]!r}")
    return answer


# --- the kinds: a seed -> a request ---


def _logprobs(seed: int) -> Body:
    return _chat(_sum(seed), logprobs=True, top_logprobs=2)


def _samples(seed: int) -> Body:
    return _chat(_sum(seed), n=3) | {"temperature": 0.7, "seed": seed}


def _tool(seed: int) -> Body:
    return _chat(f"What is the weather in {_city(seed)}?", tools=TOOLS)


def _structured(seed: int) -> Body:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    return _chat(_sum(seed), response_format=form)


def _prompt(seed: int) -> Body:
    rng = random.Random(seed)
    ids = [rng.randrange(WORDS) for _ in range(rng.randint(5, 300))]
    return _body(prompt=ids, max_tokens=16, ignore_eos=True)


def _response(seed: int) -> Body:
    return _body(input=_sum(seed), max_output_tokens=120)


def _response_call(seed: int) -> Body:
    text = f"What is the weather in {_city(seed)}?"
    return _body(input=text, tools=[{"type": "function", **WEATHER}], max_output_tokens=120)


# weight, weight streamed, kind, route, what has the same answer, body, readers of the whole and of the streamed reply
_TABLE: tuple[tuple[int, int, str, str, Callable[[int], str], Callable[[int], Body], Reader, Reader | None], ...] = (
    (10, 12, "chat", CHAT, lambda s: f"sum {_sum(s)}", lambda s: _chat(_sum(s)), read_chat, read_chat_stream),
    (4, 4, "long common prefix", CHAT, lambda s: f"facts {s}", lambda s: _chat(_facts(s)), read_chat, read_chat_stream),
    (4, 0, "logprobs", CHAT, lambda s: f"sum {_sum(s)}", _logprobs, read_logprobs, None),
    (4, 0, "n = 3, sampled", CHAT, lambda s: "three", _samples, read_samples, None),
    (4, 4, "tool call", CHAT, lambda s: f"weather {_city(s)}", _tool, read_chat, read_chat_stream),
    (3, 0, "structured output", CHAT, lambda s: f"schema {_sum(s)}", _structured, read_structured, None),
    (5, 5, "random prompt", COMPLETIONS, lambda s: f"random {s}", _prompt, read_completion, read_completion_stream),
    (4, 4, "Responses", RESPONSES, lambda s: f"response {_sum(s)}", _response, read_response, read_response_stream),
    (
        *(2, 2, "Responses, tool call", RESPONSES, lambda s: f"response {_city(s)}"),
        *(_response_call, read_response, read_response_stream),
    ),
)


def _kinds() -> Iterator[tuple[int, Callable[[int], Honest]]]:
    """(weight, seed -> request); a streamed kind follows its whole twin."""

    def maker(name: str, route: str, key: Any, body: Any, read: Reader, more: Body) -> Callable[[int], Honest]:
        return lambda seed: Honest(name, key(seed), route, {**body(seed), **more}, read)

    for weight, streamed, name, route, key, body, read, read_stream in _TABLE:
        yield weight, maker(name, route, key, body, read, {})
        if streamed:
            usage = {} if route == RESPONSES else {"stream_options": {"include_usage": True}}
            yield streamed, maker(f"{name}, streamed", route, key, body, read_stream, {"stream": True, **usage})


KINDS = tuple(_kinds())
