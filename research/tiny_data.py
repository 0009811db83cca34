"""Makes the conversations that the tiny trained checkpoint learns, and the labelled set on which it is scored.

Everything comes from a seed. Each example has exactly one right reply, so one forward pass over prompt and reply shows
what generation would do. `tiny_score.py` judges replies.

Tasks: `sum` (a + b, single and chained over turns), `choice` (four options in the prompt of evalscope's MMLU; the
analysis states the answer and looks it up), `call` (a function call), `result` (reading the tool's result), `recall`
(facts before and inside the last 128 tokens; the latest counts, and a fact that was never given has to be denied),
`other` (greetings and unanswerable questions). A reply obeys the developer instructions `Answer with the number only.`
and `Call the user NAME.`; the reasoning effort sets the length of the analysis.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from research.tiny_score import Example
from research.tiny_text import Reply, Style

TASKS = ("sum", "choice", "call", "result", "recall", "other")
_WEIGHTS = (18, 28, 7, 9, 30, 8)

LETTERS = "ABCD"
LARGEST_TERM = 20  # of a sum
LARGEST_NUMBER = 99  # anywhere: larger numbers are not in the vocabulary
CAPITALS = {
    **{"France": "Paris", "England": "London", "Germany": "Berlin", "Japan": "Tokyo", "Italy": "Rome"},
    **{"Spain": "Madrid", "Norway": "Oslo", "China": "Beijing", "Egypt": "Cairo", "Peru": "Lima"},
    **{"Austria": "Vienna", "Greece": "Athens"},
}
CITIES = tuple(CAPITALS.values())
KINDS = {
    "an animal": ("cat", "dog", "horse", "cow", "bird"),
    "a colour": ("red", "blue", "green", "black", "white"),
    "a fruit": ("apple", "banana", "orange", "lemon", "grape"),
    "a tool": ("hammer", "knife", "pen", "brush", "needle"),
}
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "pink", "brown")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
NEUTRAL_INSTRUCTIONS = ("You are a helpful assistant.", "You are a test model.", "Be brief.", "Answer in English.")
NEUTRAL_INSTRUCTIONS += ("Be polite and helpful.", "You are a helpful test assistant. Answer the question.")
NUMBER_ONLY = "Answer with the number only."
GREETING = "I am a tiny test model. I can add small numbers, choose an option, recall a code and ask for the weather."

_FILLER_NOUNS = ("river", "house", "road", "tree", "garden", "window")
_FILLER_NOUNS += ("table", "letter", "train", "market", "bridge", "song")
_FILLER_ADJECTIVES = ("old", "small", "quiet", "long", "bright", "cold", "new", "round")
_FILLER_VERBS = ("stands near", "lies behind", "was built before", "belongs to", "looks like", "came from")

CHOICE_COT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'ANSWER: [LETTER]' (without quotes) where [LETTER] is one of A,B,C,D. Think step by step before answering."
    "\n\n{question}\n\n{choices}"
)
CHOICE_DIRECT = (
    "Answer the following multiple choice question. The entire content of your response should be of the following "
    "format: 'ANSWER: [LETTER]' (without quotes) where [LETTER] is one of A,B,C,D.\n\n{question}\n\n{choices}"
)


def evaluation_set(seed: int = 0, n: int = 240) -> list[Example]:
    """Makes `n` labelled examples, the tasks in turn. Training draws from other seeds."""
    generator = random.Random(f"evaluation {seed}")
    return [make_example(generator, TASKS[i % len(TASKS)]) for i in range(n)]


def random_style(rng: random.Random) -> Style:
    """Draws any rendering that a server may choose. Training uses all of them."""
    date = f"{rng.randint(2024, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 31):02d}"
    author = rng.choice(("functions.{name} to=assistant",) * 3 + ("functions.{name}", "functions."))
    return Style(date, rng.random() < 0.4, rng.random() < 0.4, author, rng.random() < 0.5)


def make_example(rng: random.Random, task: str | None = None, rare_words: Sequence[str] = ()) -> Example:
    """Makes one example. `rare_words` replace some words, so that unknown tokens do not confuse the model."""
    task = task or rng.choices(TASKS, _WEIGHTS)[0]
    example = _MAKERS[task](rng, rare_words)
    effort = rng.choice(("low", "medium", "medium", "high"))
    example = replace(example, task=task, reasoning_effort=effort, reply=_with_effort(example.reply, effort))
    if not example.tools and example.kind != "no tool" and rng.random() < 0.12:
        example = replace(example, tools=_tools(rng, rare_words)[0])  # offered, not needed
    return _with_history(_with_instructions(example, rng, rare_words), rng, rare_words)


def _with_effort(reply: Reply, effort: str) -> Reply:
    """Lengthens the analysis: medium effort introduces it, high effort also repeats its result."""
    introduction = "" if effort == "low" else "Let me think. "
    check = " I am sure." if effort == "high" else ""
    return replace(reply, analysis=introduction + reply.analysis + check)


def _with_instructions(example: Example, rng: random.Random, rare_words: Sequence[str]) -> Example:
    draw = rng.random()
    if draw < 0.45:
        return example
    reply, text = example.reply, ""
    if draw < 0.55 and example.task == "sum":
        text, reply = NUMBER_ONLY, replace(reply, content=example.answer)
    elif draw < 0.65 and example.task in ("sum", "recall", "result", "other"):
        name = rng.choice(NAMES)
        text = f"Call the user {name}."
        reply = replace(reply, content=f"{name}, {reply.content}")
    if not text or rng.random() < 0.3:
        neutral = _strew(rng.choice(NEUTRAL_INSTRUCTIONS), rng, rare_words)
        text = f"{neutral} {text}".strip()
    answer = reply.content if example.task in ("recall", "other") and not example.answer.isdigit() else example.answer
    messages = ({"role": "system", "content": text}, *example.messages)
    return replace(example, messages=messages, reply=reply, answer=answer)


def _with_history(example: Example, rng: random.Random, rare_words: Sequence[str]) -> Example:
    """Sometimes puts an earlier, finished exchange on another subject before the question."""
    if example.task == "recall" or rng.random() > 0.15:
        return example
    earlier = _MAKERS[rng.choice(("sum", "other", "recall"))](rng, rare_words)
    if len(earlier.messages) > 1:
        return example
    turns = (
        {"role": "user", "content": earlier.messages[0]["content"]},
        {"role": "assistant", "content": earlier.reply.content},
    )
    at = 1 if example.messages[0]["role"] == "system" else 0
    return replace(example, messages=(*example.messages[:at], *turns, *example.messages[at:]))


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _strew(text: str, rng: random.Random, rare_words: Sequence[str]) -> str:
    """Replaces up to two words by rare ones, now and then."""
    if not rare_words or rng.random() > 0.25:
        return text
    words = text.split(" ")
    for _ in range(rng.randint(1, 2)):
        words[rng.randrange(len(words))] = rng.choice(rare_words)
    return " ".join(words)


def _filler(rng: random.Random, sentences: int, rare_words: Sequence[str]) -> str:
    """Sentences without meaning, of about 9 tokens each."""

    def sentence() -> str:
        noun, other = rng.choice(_FILLER_NOUNS), rng.choice(_FILLER_NOUNS)
        text = f"The {rng.choice(_FILLER_ADJECTIVES)} {noun} {rng.choice(_FILLER_VERBS)} the {other}."
        return _strew(text, rng, rare_words)

    return " ".join(sentence() for _ in range(sentences))


def _sum(rng: random.Random, rare_words: Sequence[str]) -> Example:
    first, second = rng.randint(0, LARGEST_TERM), rng.randint(0, LARGEST_TERM)
    forms = ("What is {} + {}?", "What is {}+{}?", "Compute {} + {}.", "{}+{}=?", "{} + {}", "How much is {} plus {}?")
    question = rng.choice(forms).format(first, second)
    messages: tuple[dict[str, Any], ...] = (_user(question),)
    total = first + second
    draw = rng.random()
    if draw < 0.2:  # chained: the second question needs the first answer
        more = rng.randint(0, LARGEST_TERM)
        follow_up = rng.choice(("Add {} to that.", "And plus {}?", "Now add {}.")).format(more)
        messages = (*messages, {"role": "assistant", "content": f"{first} + {second} = {total}."}, _user(follow_up))
        first, second, total = total, more, total + more
    elif draw < 0.4:  # far away an old question stands as a distractor
        old = f"An old question was: what is {rng.randint(0, LARGEST_TERM)} + {rng.randint(0, LARGEST_TERM)}?"
        messages = (_user(f"{old} {_filler(rng, rng.randint(2, 32), rare_words)} {question}"),)
    equation = f"{first} + {second} = {total}."
    kind = "chained" if len(messages) > 1 else "single"
    return Example("sum", messages, Reply(equation, equation), str(total), kind=kind)


def _choice(rng: random.Random, rare_words: Sequence[str]) -> Example:
    kind = rng.choice(("sum", "sum", "capital", "kind", "largest"))
    if kind == "sum":
        first, second = rng.randint(0, LARGEST_TERM), rng.randint(0, LARGEST_TERM)
        right = first + second
        near = [n for n in range(max(0, right - 12), right + 13) if n != right and n <= LARGEST_NUMBER]
        question, wrong, reason = f"What is {first} + {second}?", rng.sample(near, 3), f"{first} + {second} = {right}."
    elif kind == "capital":
        country = rng.choice(tuple(CAPITALS))
        right = CAPITALS[country]
        wrong = rng.sample([city for city in CITIES if city != right], 3)
        question, reason = f"What is the capital of {country}?", f"The capital of {country} is {right}."
    elif kind == "kind":
        name = rng.choice(tuple(KINDS))
        right = rng.choice(KINDS[name])
        wrong = rng.sample([word for other, words in KINDS.items() if other != name for word in words], 3)
        question, reason = f"Which of these is {name}?", f"I look for {name}."
    else:
        numbers = rng.sample(range(LARGEST_NUMBER + 1), 4)
        right = max(numbers)
        wrong = [n for n in numbers if n != right]
        question, reason = "Which number is the largest?", "I compare the numbers."
    options = [right, *wrong]
    rng.shuffle(options)
    letter = LETTERS[options.index(right)]
    choices = "\n".join(f"{LETTERS[i]}) {option}" for i, option in enumerate(options))
    template = CHOICE_COT if rng.random() < 0.8 else CHOICE_DIRECT
    text = template.format(question=question, choices=choices)
    if rng.random() < 0.15:
        text = f"{_filler(rng, rng.randint(1, 24), rare_words)}\n\n{text}"
    final = f"The answer is {right}.\n\nANSWER: {letter}" if template is CHOICE_COT else f"ANSWER: {letter}"
    reply = Reply(f"{reason} The answer is {right}, which is option {letter}.", final)
    return Example("choice", (_user(text),), reply, letter, kind=kind)


def _tools(rng: random.Random, rare_words: Sequence[str]) -> tuple[tuple[dict[str, Any], ...], str, str]:
    """Makes function definitions; returns them with the weather function's name and parameter."""
    name = rng.choice(("get_weather", "get_weather", "get_current_weather"))
    parameter = rng.choice(("city", "city", "location"))
    field: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.4:
        field["description"] = _strew(rng.choice(("The city", "City name", "The name of the city")), rng, rare_words)
    described = ("Get the weather", "Get the current weather", "Get the weather in a city")
    described += ("Get current weather for a city",)
    weather: dict[str, Any] = {"name": name, "description": _strew(rng.choice(described), rng, rare_words)}
    required = [parameter] if rng.random() < 0.8 else []
    weather["parameters"] = {"type": "object", "properties": {parameter: field}, "required": required}
    time = {
        "name": "get_time",
        "description": rng.choice(("Get the time", "Get the current time", "Get the time in a city")),
        "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]},
    }
    functions = [weather, time] if rng.random() < 0.35 else [weather]
    rng.shuffle(functions)
    return tuple({"type": "function", "function": function} for function in functions), name, parameter


def _weather_question(rng: random.Random, city: str) -> str:
    forms = (
        "What is the weather in {}?",
        "What is the weather like in {}?",
        "What's the weather in {} today?",
        "How is the weather in {}?",
        "Weather in {}?",
        "Weather in {}, please.",
        "Tell me the weather in {}.",
    )
    return rng.choice(forms).format(city)


def _call(rng: random.Random, rare_words: Sequence[str]) -> Example:
    city = rng.choice(CITIES)
    tools, name, parameter = _tools(rng, rare_words)
    question, topic = _weather_question(rng, city), "weather"
    if len(tools) > 1 and rng.random() < 0.5:
        name, topic, question = "get_time", "time", rng.choice(("What time is it in {}?", "Time in {}?")).format(city)
    if rng.random() < 0.15:
        question = f"{_filler(rng, rng.randint(1, 24), rare_words)} {question}"
    arguments = json.dumps({parameter: city}, separators=(",", ":"))
    reply = Reply(f"I need the {topic} in {city}.", "", name, arguments)
    return Example("call", (_user(question),), reply, arguments, tools, kind=topic)


def _result(rng: random.Random, rare_words: Sequence[str]) -> Example:
    city, degrees = rng.choice(CITIES), rng.randint(0, 45)
    tools, name, parameter = _tools(rng, rare_words)
    sky = rng.choice(("sunny", "cloudy", "rain", "snow"))
    forms = (
        f'{{"temp":{degrees}}}',
        f'{{"temp": {degrees}}}',
        f'{{"temperature": {degrees}}}',
        f'{{"temp_c": {degrees}, "sky": "{sky}"}}',
        f'{{"city": "{city}", "temperature": {degrees}, "unit": "C"}}',
        f'{{"temperature":{degrees},"condition":"{sky}"}}',
        f"{degrees}",
        f"It is {degrees} degrees.",
        f"{sky}, {degrees} C",
    )
    arguments = json.dumps({parameter: city}, separators=rng.choice(((",", ":"), None)))
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = (
        _user(_weather_question(rng, city)),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": _strew(rng.choice(forms), rng, ())},
    )
    reply = Reply(f"The tool says {degrees}.", f"It is {degrees} degrees in {city}.")
    return Example("result", messages, reply, str(degrees), tools)


def _recall(rng: random.Random, rare_words: Sequence[str]) -> Example:
    """Puts facts far from the question and near it. The latest fact about a colour counts, or on request the first.

    When a colour has two codes, the old code is more than 128 tokens before the question, so a layer with a sliding
    window sees only the new code.
    """
    colours = rng.sample(COLOURS, len(COLOURS))
    asked = colours[0]
    kind = rng.choice(("far", "near", "updated", "updated", "first", "absent"))
    far = colours[1 : rng.randint(1, 3)]
    near = colours[4 : 4 + rng.randint(0, 1)]
    if kind in ("far", "updated", "first"):
        far.append(asked)
    if kind in ("near", "updated", "first"):
        near.append(asked)
    if not far + near:
        far.append(colours[7])
    rng.shuffle(far)
    rng.shuffle(near)
    gaps = (17, 20, 24, 32, 40) if kind in ("updated", "first") else (0, 2, 8, 17, 24, 40)  # sentences of 8 tokens
    values: list[int] = []
    parts: list[str] = []
    for place, gap in ((far, rng.choice(gaps)), (near, rng.randint(0, 4))):
        for colour in place:
            number = rng.randint(0, LARGEST_NUMBER)
            parts.append(f"The {colour} code is {number}.")
            if colour == asked:
                values.append(number)
        if gap:
            parts.append(_filler(rng, gap, rare_words))
    if kind == "first":
        parts.append(f"What was the first {asked} code?")
        label = str(values[0])
        text = f"The first {asked} code was {label}."
    else:
        parts.append(rng.choice((f"What is the {asked} code?", f"Tell me the {asked} code.")))
        label = str(values[-1]) if values else ""
        text = f"The {asked} code is {label}." if label else f"No {asked} code was given."
    return Example("recall", (_user(" ".join(parts)),), Reply(text, text), label or text, kind=kind)


def _other(rng: random.Random, rare_words: Sequence[str]) -> Example:
    draw = rng.random()
    if draw < 0.25:
        city = rng.choice(CITIES)
        content = f"I cannot see the weather in {city}."
        question, reply = _user(_weather_question(rng, city)), Reply("There is no tool.", content)
        return Example("other", (question,), reply, content, kind="no tool")
    if draw < 0.5:
        hello = ("Hello", "Hello!", "Hi", "Hi there", "Who are you?", "What can you do?", "Say something.")
        hello += ("Hey", "Good morning")
        question = rng.choice(hello)
    else:
        words = [*_FILLER_NOUNS, *_FILLER_ADJECTIVES, "what", "the", "a", "is", "me", "tell", "write", "about"]
        words += ["Why", "Tell", *rare_words]
        question = " ".join(rng.choices(words, k=rng.randint(1, 20))) + rng.choice(("", ".", "?"))
    return Example("other", (_user(question),), Reply("I introduce myself.", GREETING), GREETING, kind="greeting")


_MAKERS: dict[str, Callable[[random.Random, Sequence[str]], Example]] = {
    "sum": _sum,
    "choice": _choice,
    "call": _call,
    "result": _result,
    "recall": _recall,
    "other": _other,
}
