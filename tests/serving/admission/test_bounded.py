"""Provokes every way in which a question can end the process that checks it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npu_gptoss.serving.admission.bounded import Bounded, Busy, Died
from npu_gptoss.serving.admission.structures import REMEMBERED, Structures, Verdict
from tests.serving.in_flight import is_running
from tests.serving.server import wait_for

SECONDS, AMPLE = 1.0, 30.0  # limits: of what is to reach it, and of what is not to, on a busy machine either


def work(question: bytes) -> bytes:
    match question:
        case b"hang":
            while True:
                pass
        case b"sleep":
            time.sleep(3600)
        case b"crash":
            ctypes.string_at(0)
        case b"abort":
            os.abort()
        case b"exit":
            os._exit(0)
        case b"memory":
            return str(len(bytearray(4 << 30))).encode()
        case b"keeper":
            return str(os.getppid()).encode()
        case b"descriptors":
            return " ".join(
                str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
            ).encode()
        case b"large":
            return b"x" * 10_000_000
    return question[::-1]


@contextmanager
def bounded(prepare: Callable[[], None] = lambda: None, seconds: float = AMPLE) -> Iterator[Bounded]:
    made = Bounded(work, prepare, seconds=seconds, memory=1 << 30)
    try:
        yield made
    finally:
        made.stop()


def ask(made: Bounded, *questions: bytes) -> list[bytes | BaseException]:
    async def all_at_once() -> list[bytes | BaseException]:
        return await asyncio.gather(*(made.ask(question) for question in questions), return_exceptions=True)

    return asyncio.run(all_at_once())


def gone(pid: int) -> bool:
    return wait_for(lambda: not is_running(pid), 5)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (b"hang", "longer than 1 s"),
        (b"sleep", "longer than 1 s"),
        (b"crash", "crashed the process"),
        (b"abort", "crashed the process"),
        (b"exit", "crashed the process"),
        (b"memory", "crashed the process"),
    ],
)
def test_a_question_that_ends_its_process_ends_nothing_else(question: bytes, said: str) -> None:
    with bounded(seconds=SECONDS if "longer" in said else AMPLE) as made:
        before = time.monotonic()
        bad, good = ask(made, question, b"abc")
        assert isinstance(bad, Died)
        assert said in str(bad)
        assert good == b"cba"
        assert time.monotonic() - before < SECONDS + 3
        keeper = made.keeper
        assert ask(made, b"once more") == [b"erom ecno"]
        assert made.keeper == keeper, "it was not the keeper that died"


def test_a_keeper_that_died_is_forked_anew() -> None:
    with bounded() as made:
        (first,) = ask(made, b"keeper")
        os.kill(int(first), signal.SIGKILL)
        assert gone(int(first))
        (second,) = ask(made, b"keeper")
        assert second != first


def test_a_keeper_that_fails_to_load_refuses_without_a_wait() -> None:
    def prepare() -> None:
        raise RuntimeError("no tokenizer")

    with bounded(prepare) as made:
        (answer,) = ask(made, b"abc")
        assert isinstance(answer, Busy)
        assert "cannot be started" in str(answer)


def test_many_questions_at_once_are_each_answered() -> None:
    with bounded() as made:
        assert ask(made, *(b"%d." % n for n in range(100))) == [b"." + str(n)[::-1].encode() for n in range(100)]
        assert len(ask(made, b"large")[0]) == 10_000_000


def test_no_connection_of_the_server_stays_open_in_the_process() -> None:
    """A copy of the listening socket would keep the port taken after the server's end."""
    with socket.socket() as listening, bounded() as made:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        (links,) = ask(made, b"descriptors")
        assert links.count(b"socket:") == 1, "its own"


def test_nothing_is_left_when_the_server_is_killed() -> None:
    """As by `kill -9`, when no `finally` runs."""
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            made = Bounded(work, seconds=60)
            (keeper,) = ask(made, b"keeper")
            os.write(writing, keeper)
            time.sleep(60)
        finally:
            os._exit(0)
    keeper = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    assert gone(keeper)


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, question: bytes) -> bytes:
        self.asked += 1
        if b"bad" in question:
            raise Died("it crashed the process that checked it")
        return b'{"backend": "xgrammar", "automatic": true, "fields": {"grammar": "as it reads it"}}'


def test_a_structure_is_compiled_once_and_an_attack_too() -> None:
    counting = Counting()
    structures = Structures(counting)
    good, bad = {"choice": ["a"]}, {"regex": "bad"}
    for _ in range(3):
        assert asyncio.run(structures.verdict(good)).backend == "xgrammar"
        assert asyncio.run(structures.verdict(bad)) == Verdict(error="it crashed the process that checked it")
    assert counting.asked == 2
    assert structures.known({"grammar": "as it reads it"}).backend == "xgrammar"
    assert structures.known({"choice": ["b"]}) is None


def test_an_unchecked_structure_is_not_refused_for_ever() -> None:
    class Starting:
        async def ask(self, question: bytes) -> bytes:
            raise Busy("not ready")

    structures = Structures(Starting())
    assert not asyncio.run(structures.verdict({"regex": "a"})).lasting
    assert structures.known({"regex": "a"}) is None


def test_verdicts_do_not_pile_up() -> None:
    structures = Structures(Counting())
    for n in range(REMEMBERED + 100):
        asyncio.run(structures.verdict({"regex": f"bad {n}"}))
    assert structures.known({"regex": "bad 0"}) is None
    assert structures.known({"regex": f"bad {REMEMBERED + 99}"}) is not None
