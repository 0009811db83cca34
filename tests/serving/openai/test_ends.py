"""The end of a server of vLLM 0.33, whose engine runs on no CPU. Others: tests/serving/test_shutdown.py."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.frontend.turns import final
from tests.serving.openai.conftest import Server, serve
from tests.serving.scripted import DIES, WAITS
from tests.serving.server import wait_for

pytestmark = [pytest.mark.serving, pytest.mark.slow, pytest.mark.vllm033]


@pytest.fixture
def ending(tiny: Path, tmp_path: Path) -> Iterator[Server]:
    with serve("0.33", tiny, tmp_path / "log", lasts=False, NPU_GPTOSS_ENGINE_RESTARTS="") as server:
        yield server


def ended(server: Server, most: float) -> int:
    """The exit status."""
    begin = time.monotonic()
    status = server.process.wait(60)
    assert time.monotonic() - begin < most
    return status


def test_signal_cuts_an_answer_without_a_word_or_waits_for_a_slow_client(ending: Server) -> None:
    """Stock: 200 with the begin of the answer; and a body that never ends keeps the server for ever."""
    host, port = ending.url.removeprefix("http://").split(":")
    with ThreadPoolExecutor(3) as pool, socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
        asked = [pool.submit(ending.ask(api), final("One") + WAITS) for api in ("chat", "responses", "messages")]
        assert wait_for(lambda: ending.post("/tokenize", {"prompt": "a"}).status == 200, 10)
        time.sleep(1)
        ending.process.send_signal(signal.SIGTERM)
        assert ended(ending, 15) == 0
        for answer in (each.result(5) for each in asked):
            assert answer.status == 503, answer.text
            assert "shutting down" in answer.json["error"]["message"]


def test_death_of_the_engine_looks_like_a_regular_end(ending: Server) -> None:
    """Stock: exit status 0, by which no supervisor starts the server again."""
    assert ending.chat(final("One") + DIES).status == 503
    assert ended(ending, 20) == 1
    assert "the engine died" in ending.log.read_text()[-3000:]
