"""Honest requests of the endurance runs: each greedy one has one right answer, taken without other load.

A streamed request is compared with the answer of its whole twin: nothing may be lost on the way. Replies are read by
tests/frontend/apis.py, which raises AssertionError for a stream that is no client's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.endure.server import NAME
from tests.frontend.apis import APIS
from tests.serving.hostile import CHAT, COMPLETIONS, RESPONSES

MESSAGES = "/v1/messages"
READERS = {CHAT: APIS["chat"], RESPONSES: APIS["responses"], MESSAGES: APIS["messages"]}
Body = dict[str, Any]
Answer = dict[str, Any]  # what is compared
TOKEN_IDS = {"return_token_ids": True}  # of a chat's or a completion's body


class Wrong(Exception):
    """Raised for a wrong reply, in words. unserved: the client was told that the server ends, or met no server."""

    def __init__(self, words: str, unserved: bool = False) -> None:
        super().__init__(words)
        self.unserved = unserved


@dataclass(frozen=True)
class Honest:
    """`check`: raises Wrong for an answer that breaks a promise of its own. `read`: of a whole reply, in place of its
    route's reader."""

    kind: str
    route: str
    body: Body
    check: Callable[[Answer], None] = lambda answer: None
    read: Callable[[Body], Answer] | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def whole(self) -> Honest:
        body = {name: value for name, value in self.body.items() if name not in ("stream", "stream_options")}
        return Honest(self.kind, self.route, body, self.check, self.read)

    @property
    def streamed(self) -> Honest:
        usage = {"stream_options": {"include_usage": True}} if self.route in (CHAT, COMPLETIONS) else {}
        return Honest(f"{self.kind}, streamed", self.route, {**self.body, "stream": True, **usage}, self.check)

    @property
    def key(self) -> str:
        """Equal for requests with one answer."""
        return self.route + json.dumps(self.whole.body, sort_keys=True)

    def answer(self, text: str, pieces: list[Body]) -> Answer:
        """Of a reply's text and its pieces: one, or a stream's."""
        if self.read is not None:
            answer = self.read(pieces[0])
        elif self.route == COMPLETIONS:
            answer = read_completion(text, pieces, self.is_streamed)
        else:
            reader = READERS[self.route]
            turn = reader.streamed(text) if self.is_streamed else reader.whole(pieces[0])
            answer = dict(zip(("content", "reasoning", "calls", "finish"), turn, strict=True)) | spent(pieces)
        self.check(answer)
        return answer


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


# --- requests ---


def chat(kind: str, text: str | list[Body], **fields: Any) -> Honest:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    check, read = fields.pop("check", lambda answer: None), fields.pop("read", None)
    return Honest(kind, CHAT, {**BASE, "messages": messages, "max_tokens": 120, **fields}, check, read)


def completion(kind: str, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Honest:
    return Honest(kind, COMPLETIONS, {**BASE, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def response(kind: str, said: str | list[Body], **fields: Any) -> Honest:
    return Honest(kind, RESPONSES, {**BASE, "input": said, "max_output_tokens": 120, **fields})


def message(kind: str, text: str | list[Body], **fields: Any) -> Honest:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return Honest(kind, MESSAGES, {**BASE, "messages": messages, "max_tokens": 120, **fields})


BASE = {"model": NAME, "temperature": 0}


# --- readers of what tests/frontend does not read


def spent(pieces: list[Body]) -> Answer:
    """The counts of tokens that a reply tells last."""
    told = [usage for piece in pieces if (usage := piece.get("usage") or (piece.get("response") or {}).get("usage"))]
    return {
        name: told[-1][name] for name in ("prompt_tokens", "completion_tokens", "output_tokens") if name in told[-1]
    }


def read_logprobs(piece: Body) -> Answer:
    """As a chat; every token of the answer has its log-probability, and the chosen one is the likeliest."""
    (choice,) = piece["choices"]
    tokens = choice["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    if text != choice["message"]["content"]:
        raise Wrong(f"the content is {choice['message']['content']!r}, the log-probabilities are {text!r}'s")
    for token in tokens:
        best = max(other["logprob"] for other in token["top_logprobs"])
        if token["logprob"] < best - 1e-6:
            raise Wrong(f"greedy took {token['token']!r} at {token['logprob']}, {best} was there")
    return {"turn": READERS[CHAT].whole(piece)} | spent([piece])


def read_samples(piece: Body) -> Answer:
    """n sampled choices: each is there, ended, and not empty. Their texts are chance."""
    for choice in piece["choices"]:
        message = choice["message"]
        if choice["finish_reason"] not in ("stop", "length", "tool_calls"):
            raise Wrong(f"finish_reason {choice['finish_reason']}")
        if not (message.get("content") or message.get("reasoning_content") or message.get("tool_calls")):
            raise Wrong("an empty choice")
    return {"indices": sorted(choice["index"] for choice in piece["choices"])}


def read_completion(text: str, pieces: list[Body], is_streamed: bool) -> Answer:
    assert not is_streamed or text.endswith("data: [DONE]\n\n"), "the stream has no end"
    choices = [choice for piece in pieces for choice in piece["choices"]]
    (finish,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return {"text": "".join(choice["text"] for choice in choices), "finish": finish} | spent(pieces)
