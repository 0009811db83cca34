"""The scenarios: each generates without end what is asked at once, mostly one request.

What is due follows from its type: of an Honest one its answer alone, of a Hostile one its status; a Rude client must
not get stuck.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.endure.clients import DAWDLE, LEAVE, Rude
from tests.endure.honest_requests import (
    Answer,
    Honest,
    Wrong,
    chat,
    completion,
    message,
    read_logprobs,
    read_samples,
    response,
)
from tests.serving.hostile import CHAT, COMPLETIONS, HOSTILE, Hostile

Item = Honest | Hostile | Rude
VARIANTS = 12  # of each kind of honest request
WORDS = 201_000  # below every special token
WINDOW = 8192  # tokens that the servers here take


@dataclass(frozen=True)
class Scenario:
    """does: what an operator does beside it (loop.py)."""

    about: str
    items: Callable[[random.Random], Iterator[list[Item]]]
    does: str = ""


WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CITIES = ("Paris", "London", "Rome", "Oslo", "Berlin", "Tokyo", "Madrid", "Cairo")
SEASONS = ["spring", "autumn"]
# closed values: a free number or text could go on until max_tokens
OBJECT = {
    "type": "object",
    "properties": {"season": {"enum": SEASONS}, "even": {"type": "boolean"}},
    "required": ["season", "even"],
    "additionalProperties": False,
}


def tools(number: int = 1) -> list[dict[str, Any]]:
    """get_weather is the last of them."""
    others = [
        {**WEATHER, "name": f"get_news_{n}", "description": f"Get the news of page {n}"} for n in range(1, number)
    ]
    return [{"type": "function", "function": one} for one in (*others, WEATHER)]


TOOLS = tools()


def _sum(seed: int) -> str:
    return f"What is {seed % 9 + 1} + {seed % 7 + 2}?"


def _weather(seed: int) -> str:
    return f"What is the weather in {CITIES[seed % len(CITIES)]}?"


def _ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(WORDS) for _ in range(length)]


def _facts(seed: int) -> str:
    colour, number = ("red", "green", "blue")[seed % 3], seed % 80 + 10
    facts = " ".join(f"The river code is {n}." for n in range(40))
    return f"The {colour} code is {number}. {facts} The pink code is 5. What is the pink code?"


def either(rng: random.Random, request: Honest) -> Honest:
    return request.streamed if rng.random() < 0.5 and request.read is None else request


# --- honest scenarios ---


def short(rng: random.Random) -> Iterator[list[Item]]:
    """One request in 60 comes as a burst: each of 16 in flight becomes ten now and then."""
    while True:
        times = 10 if rng.random() < 1 / 60 else 1
        yield [either(rng, chat("short", _sum(rng.randrange(VARIANTS)))) for _ in range(times)]


def long_prompts(rng: random.Random) -> Iterator[list[Item]]:
    lengths = (1000, 4000, WINDOW - 8)
    while True:
        length = rng.choice(lengths)
        yield [either(rng, completion(f"prompt of {length}", _ids(rng.randrange(2), length), max_tokens=8))]


def decode(rng: random.Random) -> Iterator[list[Item]]:
    while True:
        yield [either(rng, completion("decode", _ids(rng.randrange(4), 20), max_tokens=rng.choice((30, 200))))]


def prefixes(rng: random.Random) -> Iterator[list[Item]]:
    """Prompts that part after a block, within one, and after 1 000 tokens."""
    whole = _ids(0, 1000)
    while True:
        common, tail = rng.choice((16, 100, 1000)), rng.randrange(3)
        ids = completion("common prefix", [*whole[:common], *_ids(tail + 1, 5 + tail)])
        yield [either(rng, rng.choice((ids, chat("common facts", _facts(rng.randrange(VARIANTS))))))]


def conversations(rng: random.Random) -> Iterator[list[Item]]:
    """Each turn repeats the turns before; up to six of them, over chat, Responses and Messages."""
    makers = (chat, response, message)
    while True:
        start, make = rng.randrange(3), rng.choice(makers)
        said: list[dict[str, Any]] = []
        for turn in range(rng.randint(2, 6)):
            a, b = start + turn, turn + 2
            said.append({"role": "user", "content": f"What is {a} + {b}?"})
            yield [either(rng, make(f"conversation over {make.__name__}", list(said)))]
            said.append({"role": "assistant", "content": f"{a} + {b} = {a + b}."})


def calls(rng: random.Random) -> Iterator[list[Item]]:
    """16 and 64 tools, one call or four at once."""
    while True:
        number, times = rng.choice((1, 16, 64)), rng.choice((1, 1, 1, 4))
        yield [_call(rng, number) for _ in range(times)]


def _call(rng: random.Random, number: int) -> Honest:
    text, given = _weather(rng.randrange(4)), tools(number)
    flat = [{"type": "function", **tool["function"]} for tool in given]
    anthropic = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]} for tool in flat
    ]
    kind = f"{number} tools"
    makers = (
        lambda: chat(kind, text, tools=given),
        lambda: response(kind, text, tools=flat),
        lambda: message(kind, text, tools=anthropic),
    )
    return either(rng, rng.choice(makers)())


def _fits(test: Callable[[str], bool]) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        if answer["finish"] == "stop" and not test(answer["content"]):
            raise Wrong(f"against its structure: {answer['content'][:100]!r}")

    return check


def _is_object(text: str) -> bool:
    found = json.loads(text)
    return set(found) == set(OBJECT["properties"]) and isinstance(found["even"], bool)


# kind, fields of a chat, what its content has to be
STRUCTURES: tuple[tuple[str, dict[str, Any], Callable[[str], bool]], ...] = (
    (
        "schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": OBJECT}}},
        _is_object,
    ),
    ("JSON", {"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ("regex", {"guided_regex": "(3|7) apples"}, lambda text: re.fullmatch("(3|7) apples", text) is not None),
    ("choice", {"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ("grammar", {"guided_grammar": 'root ::= "aa" | "b"'}, lambda text: text in ("aa", "b")),
    ("guided JSON", {"guided_json": {"enum": SEASONS}}, lambda text: json.loads(text) in SEASONS),
)


def structures(rng: random.Random) -> Iterator[list[Item]]:
    while True:
        kind, fields, test = rng.choice(STRUCTURES)
        yield [either(rng, chat(kind, _sum(rng.randrange(4)), check=_fits(test), **fields))]


def routine(rng: random.Random) -> Iterator[list[Item]]:
    """Each kind of short honest request."""
    makers: tuple[Callable[[int], Honest], ...] = (
        lambda seed: chat("short", _sum(seed)),
        lambda seed: chat("common facts", _facts(seed)),
        lambda seed: chat("logprobs", _sum(seed), logprobs=True, top_logprobs=2, read=read_logprobs),
        lambda seed: chat("n = 3, sampled", _sum(seed), n=3, temperature=0.7, seed=seed, read=read_samples),
        lambda seed: completion("random prompt", _ids(seed, 5 + 25 * seed)),
        lambda seed: response("Responses", _sum(seed)),
        lambda seed: message("Messages", _sum(seed)),
        lambda seed: _call(random.Random(seed), 1).whole,
        lambda seed: chat("schema", _sum(seed), check=_fits(_is_object), **STRUCTURES[0][1]),
    )
    while True:
        yield [either(rng, rng.choice(makers)(rng.randrange(VARIANTS)))]


# --- scenarios with other clients ---


def _hostile(rng: random.Random) -> Iterator[Hostile]:
    while True:
        yield from rng.sample(HOSTILE, len(HOSTILE))


def beside(rng: random.Random, honest: Iterator[list[Item]], **shares: float) -> Iterator[list[Item]]:
    """shares: of hostile requests, of clients that dawdle, of those that leave; the rest is honest."""
    others = {
        "hostile": _hostile(rng),
        "dawdle": (rng.choice(DAWDLE) for _ in itertools.count()),
        "leave": (rng.choice(LEAVE) for _ in itertools.count()),
    }
    names, weights = [*shares, ""], [*shares.values(), 1 - sum(shares.values())]
    while True:
        name = rng.choices(names, weights)[0]
        yield [next(others[name])] if name else next(honest)


def overflow(rng: random.Random) -> Iterator[list[Item]]:
    """A prompt beyond the window is refused, and one whose answer would be; the last token of the window is served."""
    said = {"model": "gpt-oss-tiny", "messages": [{"role": "user", "content": "a " * WINDOW}]}
    bodies = (
        (COMPLETIONS, {"model": "gpt-oss-tiny", "prompt": _ids(0, WINDOW + 1), "max_tokens": 1}),
        (COMPLETIONS, {"model": "gpt-oss-tiny", "prompt": _ids(0, 1000), "max_tokens": WINDOW}),
        (CHAT, {**said, "max_tokens": 4}),
        (CHAT, {**said, "stream": True}),
    )
    refused = [Hostile(f"over the window {n}", r, json.dumps(b).encode(), 400, None) for n, (r, b) in enumerate(bodies)]
    fits = completion("up to the window", _ids(1, WINDOW - 4), max_tokens=4)
    honest = routine(rng)
    while True:
        yield rng.choices(([rng.choice(refused)], [either(rng, fits)], next(honest)), (8, 1, 8))[0]


SCENARIOS: dict[str, Scenario] = {
    "short": Scenario("short chats, with tenfold bursts", short),
    "long": Scenario("prompts of 1 000 tokens to the whole window", long_prompts),
    "decode": Scenario("answers of up to 200 tokens", decode),
    "prefixes": Scenario("common prefixes", prefixes),
    "mix": Scenario(
        "70 % honest, 20 % hostile, 10 % rude",
        lambda rng: beside(rng, routine(rng), hostile=0.2, dawdle=0.05, leave=0.05),
    ),
    "conversations": Scenario("growing conversations over three APIs", conversations),
    "tools": Scenario("1, 16 and 64 tools, calls in bursts", calls),
    "structures": Scenario("structured output of every kind", structures),
    "overflow": Scenario("prompts and answers beyond the window", overflow),
    "pressure": Scenario(
        "mostly hostile requests and slow or half-closed clients",
        lambda rng: beside(rng, routine(rng), hostile=0.4, dawdle=0.3),
    ),
    "cancellation": Scenario("clients that leave at every stage", lambda rng: beside(rng, routine(rng), leave=0.6)),
    "changes": Scenario(
        "prefix cache emptied, sleep, other weights, adapters: done or refused under load", routine, does="changes"
    ),
    "restarts": Scenario("SIGTERM and a new start under load", routine, does="restarts"),
}
