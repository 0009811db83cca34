"""Rude clients: they leave, dawdle, close a half of their socket, or send half of a body. Most get no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from tests.endure.server import NAME
from tests.serving.hostile import CHAT, COMPLETIONS, RESPONSES

PATIENCE = 120  # seconds; a server that sends nothing for so long is stuck
LONG = {"max_tokens": 400, "ignore_eos": True}  # it would go on for long if nobody left


class Stuck(Exception):
    """Raised when the server owed an answer and gave none."""


@contextlib.asynccontextmanager
async def connection(url: str, receive_buffer: int = 0):
    """(reader, writer) of a plain connection, closed abruptly at the end."""
    parts = urlsplit(url)
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=made, limit=2**16 if not receive_buffer else 2**12)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def request(route: str, body: dict[str, object], length: int | None = None) -> bytes:
    """A request; `length`: of the body, as the header says."""
    raw = json.dumps({"model": NAME, **body}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: endure\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw) if length is None else length}\r\n\r\n".encode() + raw


async def _some(reader: asyncio.StreamReader, pieces: int, pause: float = 0.0) -> bool:
    """Reads so many lines of a stream; True when it ended before."""
    for _ in range(pieces):
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        if not line or line.strip() == b"data: [DONE]":
            return True
        await asyncio.sleep(pause)
    return False


QUESTION = {"messages": [{"role": "user", "content": "What is 3 + 4?"}]}


async def leaves_a_stream(url: str, rng: random.Random) -> None:
    """Hears a few pieces and goes: while the prompt is computed, at the first token, in the middle."""
    # a chat without ignore_eos: nothing is sent of what the model writes behind its answer
    prompts = ([7, 8, 9], [7] * 2000)
    route, body = rng.choice([(CHAT, QUESTION), *((COMPLETIONS, {"prompt": prompt, **LONG}) for prompt in prompts)])
    async with connection(url) as (reader, writer):
        writer.write(request(route, {**body, "stream": True}))
        await _some(reader, rng.choice((1, 2, 4, 30, 100)))


async def leaves_a_response(url: str, rng: random.Random) -> None:
    async with connection(url) as (reader, writer):
        writer.write(request(RESPONSES, {"input": "What is 3 + 4?", "stream": True}))
        await _some(reader, rng.randint(1, 12))


async def leaves_a_message(url: str, rng: random.Random) -> None:
    async with connection(url) as (reader, writer):
        writer.write(request("/v1/messages", {**QUESTION, "max_tokens": 400, "stream": True}))
        await _some(reader, rng.randint(1, 12))


async def leaves_at_once(url: str, rng: random.Random) -> None:
    """Asks for many long choices and does not wait for any."""
    async with connection(url) as (_, writer):
        writer.write(request(CHAT, {**QUESTION, **LONG, "n": rng.randint(1, 4)}))
        await writer.drain()
        await asyncio.sleep(rng.choice((0, 0.01, 0.3)))


async def leaves_at_the_end(url: str, rng: random.Random) -> None:
    """Goes as the last token comes."""
    async with connection(url) as (reader, writer):
        body = {"prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True, "stream": True}
        writer.write(request(COMPLETIONS, body))
        await _some(reader, 5 + 2 * 5 - 1)


async def closes_half(url: str, rng: random.Random) -> None:
    """Sends no more after its request, as HTTP allows: it may be answered or taken for gone, and no more."""
    async with connection(url) as (reader, writer):
        writer.write(request(CHAT, {**QUESTION, "max_tokens": 3}))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), PATIENCE)


async def reads_slowly(url: str, rng: random.Random) -> None:
    """Takes a stream through a small window, with pauses; it has to be whole all the same."""
    async with connection(url, receive_buffer=4096) as (reader, writer):
        writer.write(request(COMPLETIONS, {"prompt": [7, 8, 9], "max_tokens": 100, "ignore_eos": True, "stream": True}))
        if not await _some(reader, 2000, pause=0.02):
            raise Stuck("a slowly read stream of 100 tokens did not end within 2000 lines")


async def sends_half_a_body(url: str, rng: random.Random) -> None:
    """Promises more than it sends, and goes."""
    async with connection(url) as (_, writer):
        whole = request(CHAT, QUESTION, length=rng.choice((500, 10_000, 10**9)))
        writer.write(whole[: rng.randint(20, len(whole))])
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 2))


async def sends_slowly(url: str, rng: random.Random) -> None:
    """A body in drops: slow is no mistake, so it is answered."""
    async with connection(url) as (reader, writer):
        raw = request(CHAT, {**QUESTION, "max_tokens": 3})
        for start in range(0, len(raw), 40):
            writer.write(raw[start : start + 40])
            await writer.drain()
            await asyncio.sleep(0.05)
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        if b" 200 " not in line:
            raise Stuck(f"a body sent slowly was answered {line[:60]!r}")


async def talks_nonsense(url: str, rng: random.Random) -> None:
    """No HTTP at all, headers without an end, wrong lengths, methods and unknown routes."""
    said = rng.choice(
        [
            rng.randbytes(200),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
            b"DELETE /v1/chat/completions HTTP/1.1\r\nHost: a/x?\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n",
            b"GET /v1/nothing%00\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        ]
    )
    async with connection(url) as (reader, writer):
        writer.write(said)
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            await writer.drain()
            await asyncio.wait_for(reader.read(100), 1)


Rude = Callable[[str, random.Random], Awaitable[None]]
LEAVE: tuple[Rude, ...] = (
    *(leaves_a_stream, leaves_a_stream, leaves_a_response, leaves_a_message, leaves_at_once),
    *(leaves_at_the_end, sends_half_a_body),
)
DAWDLE: tuple[Rude, ...] = (reads_slowly, sends_slowly, closes_half, talks_nonsense, sends_half_a_body)


def name(rude: Rude) -> str:
    return rude.__name__.replace("_", " ")
