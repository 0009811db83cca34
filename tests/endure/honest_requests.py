"""Honest requests of the endurance runs: each greedy one has one right answer, taken without other load.

A streamed request is compared with the answer of its whole twin: nothing may be lost on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.endure.server import NAME
from tests.serving.hostile import CHAT, COMPLETIONS, RESPONSES

MESSAGES = "/v1/messages"
Body = dict[str, Any]
Answer = dict[str, Any]  # what is compared
Reader = Callable[[list[Any]], Answer]  # of the pieces of a reply: one, or a stream's
TOKEN_IDS = {"return_token_ids": True}  # of a chat's or a completion's body


class Wrong(Exception):
    """Raised for a wrong reply, in words. unserved: the client was told that the server ends, or met no server."""

    def __init__(self, words: str, unserved: bool = False) -> None:
        super().__init__(words)
        self.unserved = unserved


@dataclass(frozen=True)
class Honest:
    """`check`: raises Wrong for an answer that breaks a promise of its own. `read`: in place of its route's reader."""

    kind: str
    route: str
    body: Body
    check: Callable[[Answer], None] = lambda answer: None
    read: Reader | None = None

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

    def answer(self, pieces: list[Any]) -> Answer:
        answer = (self.read or READERS[self.route, self.is_streamed])(pieces)
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


# --- readers: the pieces of a reply -> what is compared ---


def _of_message(message: Body, finish: str, usage: list[int]) -> Answer:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(function["name"], _arguments(function["arguments"])) for function in functions],
        "finish": finish,
        "usage": usage,
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


def _count(piece: Body) -> list[int]:
    usage = piece["usage"]
    return [usage["prompt_tokens"], usage["completion_tokens"]]


def read_chat(pieces: list[Any]) -> Answer:
    (choice,) = pieces[0]["choices"]
    return _of_message(choice["message"], choice["finish_reason"], _count(pieces[0]))


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
    return _of_message(written, _only(finishes), _count(pieces[-1]))


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


def read_completion(pieces: list[Any]) -> Answer:
    (choice,) = pieces[0]["choices"]
    return {"text": choice["text"], "finish": choice["finish_reason"], "usage": _count(pieces[0])}


def read_completion_stream(pieces: list[Any]) -> Answer:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return {"text": "".join(c["text"] for c in choices), "finish": _only(finishes), "usage": _count(pieces[-1])}


def read_response(pieces: list[Any]) -> Answer:
    answer, items = pieces[0], []
    for item in answer["output"]:
        if item["type"] == "function_call":
            items.append(["call", item["name"], item["arguments"]])
        else:
            items.append([item["type"], "".join(part.get("text", "") for part in item.get("content") or [])])
    return {"status": answer["status"], "items": items}


def read_response_stream(pieces: list[Any]) -> Answer:
    """The final object; the deltas have to add up to it."""
    if pieces[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise Wrong(f"the last event is {pieces[-1]['type']}")
    numbers = [piece["sequence_number"] for piece in pieces]
    if numbers != sorted(set(numbers)):
        raise Wrong("sequence numbers do not rise")
    answer = read_response([pieces[-1]["response"]])
    for kind, delta in (("message", "output_text"), ("call", "function_call_arguments")):
        pieced = "".join(piece["delta"] for piece in pieces if piece["type"] == f"response.{delta}.delta")
        final = "".join(item[-1] for item in answer["items"] if item[0] == kind)
        if pieced != final:
            raise Wrong(f"the deltas of a {kind} say {pieced[:80]!r}, the final object says {final[:80]!r}")
    return answer


def read_message(pieces: list[Any]) -> Answer:
    blocks = []
    for block in pieces[0]["content"]:
        value = block.get("text", block.get("thinking", block.get("input")))
        blocks.append([block["type"], block.get("name", ""), value])
    return {"blocks": blocks, "finish": pieces[0]["stop_reason"], "tokens": pieces[0]["usage"]["output_tokens"]}


def read_message_stream(pieces: list[Any]) -> Answer:
    if [pieces[0]["type"], pieces[-1]["type"]] != ["message_start", "message_stop"]:
        raise Wrong(f"a stream from {pieces[0]['type']} to {pieces[-1]['type']}")
    blocks: dict[int, list[Any]] = {}
    end: Body = {}
    for piece in pieces:
        if piece["type"] == "content_block_start":
            blocks[piece["index"]] = [piece["content_block"]["type"], piece["content_block"].get("name", ""), ""]
        elif piece["type"] == "content_block_delta":
            delta = piece["delta"]
            words = delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
            blocks[piece["index"]][2] += words
        elif piece["type"] == "message_delta":
            end = piece
    for block in blocks.values():
        block[2] = json.loads(block[2] or "{}") if block[0] == "tool_use" else block[2]
    return {
        "blocks": [blocks[place] for place in sorted(blocks)],
        "finish": end["delta"]["stop_reason"],
        "tokens": end["usage"]["output_tokens"],
    }


READERS: dict[tuple[str, bool], Reader] = {
    (CHAT, False): read_chat,
    (CHAT, True): read_chat_stream,
    (COMPLETIONS, False): read_completion,
    (COMPLETIONS, True): read_completion_stream,
    (RESPONSES, False): read_response,
    (RESPONSES, True): read_response_stream,
    (MESSAGES, False): read_message,
    (MESSAGES, True): read_message_stream,
}
