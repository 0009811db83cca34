"""The engine dies within a turn: the client of each API gets the turn as if nothing had been."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.frontend.apis import APIS, gathered
from tests.frontend.turns import THOUGHT, TURNS, final
from tests.serving.openai.conftest import NAME, Server
from tests.serving.scripted import DIES

pytestmark = [pytest.mark.serving, pytest.mark.slow]

OFTEN = (0.0, 0.5, 0.5, 1.0)  # before the first token, twice at one place, before the last piece
CASES = [
    (list(APIS)[number % len(APIS)], name) for number, name in enumerate(TURNS)
]  # a death costs a tenth of a second


def deadly(text: str, shares: tuple[float, ...]) -> str:
    """The text with deaths after these shares of it; none within a control token."""
    pieces = re.findall(r"<\|\w+\|>|.", text, re.DOTALL)
    for share in sorted(shares, reverse=True):
        pieces.insert(int(share * (len(pieces) - 1)), DIES)
    return "".join(pieces)


@pytest.mark.parametrize(("api", "name"), CASES)
def test_turn_loses_or_doubles_something_when_the_engine_dies(server: Server, api: str, name: str) -> None:
    text, fields, want = TURNS[name]
    form, ask = APIS[api], server.ask(api)
    fields, want, text = form.fields(fields), form.wanted(want), deadly(text, OFTEN)
    whole = ask(text, **fields)
    assert whole.status == 200, whole.text
    assert form.whole(whole.json) == want
    assert form.streamed(ask(text, stream=True, **fields).text) == want


@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 3}, {"presence_penalty": 1}], ids=str)
def test_samples_of_one_chat_get_mixed_up_when_the_engine_dies(server: Server, fields: dict[str, Any]) -> None:
    text = deadly(THOUGHT + "<|start|>assistant" + final("One two three."), (0.3, 0.8))
    fields = fields | {"n": 2, "logprobs": True, "top_logprobs": 1}
    calm = server.chat(text.replace(DIES, ""), **fields).json
    whole = server.chat(text, **fields).json
    lines = server.chat(text, stream=True, **fields).lines
    for index, (choice, wanted) in enumerate(zip(whole["choices"], calm["choices"], strict=True)):
        assert choice["message"] == wanted["message"]
        assert gathered(lines, index)[:2] == (wanted["message"]["content"], wanted["message"]["reasoning"])
        assert len(choice["logprobs"]["content"]) >= len(wanted["logprobs"]["content"])


def test_tokens_before_a_death_count_twice_or_not_at_all(server: Server) -> None:
    text = deadly(THOUGHT + "<|start|>assistant" + final("One two three."), (0.3,))
    answer = server.chat(text, return_token_ids=True, max_tokens=9).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_completion_ends_elsewhere_when_the_engine_dies_in_its_stop_string(server: Server, stream: bool) -> None:
    body = {"model": NAME, "prompt": f"{DIES}one tw{DIES}o three fo{DIES}ur five", "max_tokens": 90, "stop": "four"}
    answer = server.post("/v1/completions", body | {"stream": stream})
    assert answer.status == 200, answer.text
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.lines] if stream else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "one two three "
    assert choices[-1]["finish_reason"] == "stop"


def test_new_engine_is_not_there_after_a_death(server: Server) -> None:
    assert server.chat(deadly(final("One."), (0.5,))).status == 200
    assert "is being started anew" in server.log.read_text()
