"""One streamed request to an OpenAI-compatible server, and when its answer came.

The stream's server-sent events are read as they arrive, each with the clock's time. What carries output is told from
what does not (the role that a chat begins with, the usage at the end), and tokens are counted by the server's own
`usage`, because one event may hold several. A request that did not end as it should is an answer with a reason, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_gptoss.errors import InputError

if TYPE_CHECKING:
    import aiohttp

Clock = Callable[[], float]

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/completions", CHAT: "/chat/completions"}
# fields of a chat's delta in which a server sends what the model wrote
OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
LONGEST_REASON = 200
BODY_END_S = 0.5  # it comes right behind [DONE]


@dataclass(frozen=True)
class Answer:
    """Times in seconds of one clock. error: why it does not count, in words; None when it does.

    sent: when the request was handed over; outputs: of each event that carried output; end: of the finish reason, or
    of the failure. Tokens are the server's count.
    """

    sent: float
    end: float
    outputs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class StreamError(Exception):
    """What the server said or left out that makes an answer useless."""


@dataclass
class Stream:
    """What a stream has said so far. `take` its events in order, then ask for the `answer`."""

    api: str
    outputs: list[float] = field(default_factory=list)
    finished: float | None = None
    usage: Mapping[str, Any] | None = None

    def take(self, event: Any, now: float) -> None:
        if not isinstance(event, dict):
            raise StreamError(f"an event of the stream is no object: {event!r:.80}")
        if event.get("error") or event.get("object") == "error":
            raise StreamError(f"the server ended the stream: {message_of(event)}")
        if isinstance(event.get("usage"), dict):  # some servers send it along with each event: the last one counts
            self.usage = event["usage"]
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise StreamError(f"the choices of an event are no objects: {choices!r:.80}")
        for choice in choices:
            if self._carries_output(choice):
                self.outputs.append(now)
            if choice.get("finish_reason"):
                self.finished = now

    def answer(self, sent: float) -> Answer:
        if self.finished is None:
            raise StreamError("the stream ended before a finish_reason")
        counts = [(self.usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")]
        if not all(isinstance(count, int) for count in counts):
            raise StreamError(
                "the stream has no usage: the server does not know stream_options.include_usage, so nobody can tell "
                "how many tokens it sent"
            )
        prompt_tokens, output_tokens = counts
        if not self.outputs or output_tokens < 1:
            raise StreamError("no event of the stream carried output")
        return Answer(sent, max(self.finished, self.outputs[-1]), tuple(self.outputs), prompt_tokens, output_tokens)

    def _carries_output(self, choice: Mapping[str, Any]) -> bool:
        if self.api == COMPLETIONS:
            return bool(choice.get("text"))
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise StreamError(f"the delta of an event is no object: {delta!r:.80}")
        return any(delta.get(name) for name in OUTPUT_FIELDS)


def message_of(body: Any) -> str:
    """The sentence within an error's JSON, or all of it; one line."""
    if isinstance(body, Mapping):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, Mapping) else error
    text = " ".join(str(body).split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """The JSON of each `data:` line, up to `[DONE]`; comments and empty lines are nothing."""
    pending = b""
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            text = line.strip()
            if not text.startswith(b"data:"):
                continue
            text = text[len(b"data:") :].strip()
            if text == b"[DONE]":
                return
            try:
                yield json.loads(text)
            except ValueError:
                raise StreamError(f"an event of the stream is no JSON: {text[:80]!r}") from None


async def ask(session: aiohttp.ClientSession, url: str, api: str, body: Mapping[str, Any], clock: Clock) -> Answer:
    """One request to `url` (without the API's path). Never raises for what the server or the network does."""
    import aiohttp

    stream, sent = Stream(api), clock()

    def failed(reason: str) -> Answer:
        return Answer(sent, clock(), tuple(stream.outputs), error=reason)

    try:
        async with session.post(url + PATHS[api], json=body) as response:
            if response.status != 200:
                return failed(f"HTTP {response.status}: {message_of(await _body(response))}")
            async for event in events(response.content.iter_any()):
                stream.take(event, clock())
            answer = stream.answer(sent)
            # a connection whose body was not read to its end is closed, and the next request pays for another
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError, aiohttp.ClientError, OSError):
                await asyncio.wait_for(response.content.read(), BODY_END_S)
            return answer
    except StreamError as error:
        return failed(str(error))
    except (asyncio.TimeoutError, TimeoutError):
        return failed(f"no end within {session.timeout.total:g} s")
    except aiohttp.ClientConnectorError as error:
        return failed(f"no connection ({error.os_error.strerror or error.os_error})")
    except (aiohttp.ClientError, OSError):
        where = "in the middle of the answer" if stream.outputs else "before the first token"
        return failed(f"the connection broke {where}")


async def _body(response: aiohttp.ClientResponse) -> Any:
    text = await response.text(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


async def served_model(session: aiohttp.ClientSession, url: str, wanted: str | None) -> str:
    """The name to ask for: the wanted one if it is served, or the only one. Raises InputError in all other cases."""
    import aiohttp

    try:
        async with session.get(f"{url}/models") as response:
            status, content = response.status, await _body(response)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"no server answers at {url} ({reason}): start one, or name another with --url") from None
    try:
        names = [model["id"] for model in content["data"]]
    except (TypeError, KeyError):
        if wanted is not None and status in (404, 405):  # not every server lists what it serves
            return wanted
        raise InputError(
            f"{url}/models answered {status}, not with a list of models: {message_of(content)}; --url is the address "
            "that an OpenAI client takes, for example http://127.0.0.1:8000/v1"
        ) from None
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        got = "none was named with --model" if wanted is None else f"got --model {wanted}"
        raise InputError(f"{url} serves {', '.join(names) or 'no model'}; {got}")
    return wanted


async def server_version(session: aiohttp.ClientSession, url: str) -> str | None:
    """What /version of vLLM says; None of a server that has none."""
    import aiohttp

    try:
        async with session.get(url.removesuffix("/v1") + "/version") as response:
            content = await _body(response) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return None
    return content["version"] if isinstance(content, dict) and isinstance(content.get("version"), str) else None
