"""Ends a real `vllm serve`, and kills the engine of another, both under load: clients and supervisors get an answer."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from docker import healthcheck
from scripts import serve_here
from tests.endure.server import NAME, Served, Stack
from tests.serving.in_flight import InFlight, descendants, engines_of, is_running
from tests.serving.server import wait_for

pytestmark = [pytest.mark.serving, pytest.mark.slow]


class Started(Served):
    """A server whose processes are known once it is ready."""

    def start(self) -> Started:
        super().start()
        (self.engine,) = engines_of(self.process.pid)
        self.below = descendants(self.process.pid)
        return self

    def health(self) -> int:
        return requests.get(f"{self.url}/health", timeout=30).status_code

    def busy(self) -> InFlight:
        requests = InFlight(self.url, NAME)
        assert wait_for(lambda: "POST /v1/chat/completions" in self.log.read_text(), 30), "no stream has begun"
        return requests

    def ended(self, seconds: float) -> tuple[int, float]:
        """Its exit status, and the seconds until then."""
        begin = time.monotonic()
        return self.process.wait(seconds), time.monotonic() - begin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("shutdown") / "model"
    write_tiny(folder, trained=True)
    return folder


OTHERS = [
    pytest.param("cpu-0.33", marks=pytest.mark.vllm033),
    pytest.param("emulated-9.1", marks=[pytest.mark.emulated, pytest.mark.long]),
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.long]),
]


@pytest.fixture
def started(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Started]:
    server = Started(Stack(request.param), model, tmp_path / "log").start()
    try:
        yield server
    finally:
        serve_here.stop(server.process)


@pytest.mark.parametrize("started", ["cpu", *OTHERS], indirect=True)
def test_a_signal_under_load_answers_every_client(started, monkeypatch):
    """Stock: /health says 200 for ever; the clients are never answered and the server waits for them."""
    monkeypatch.setenv("PORT", str(started.port))
    assert (started.health(), healthcheck.main()) == (200, 0)
    os.kill(started.engine, signal.SIGSTOP)
    try:
        assert wait_for(lambda: started.health() == 503, 30)
        assert healthcheck.main() == 1
    finally:
        os.kill(started.engine, signal.SIGCONT)
    assert wait_for(lambda: started.health() == 200, 5)

    told_to_stop(started, lambda: started.process.send_signal(signal.SIGTERM))


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def told_to_stop(started: Started, stop: Callable[[], None]) -> None:
    """Under load every client gets an answer, one on its way too, a body that never ends holds nothing up, and no
    process is left."""
    requests = started.busy()
    assert started.health() == 200, "busy is not dead"
    with connected(started.port) as late, connected(started.port) as endless:
        endless.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90\r\n\r\n{")
        stop()
        time.sleep(0.2)  # uvicorn cuts connections that have said nothing within 0.1 s
        late.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert late.recv(1 << 16).startswith(b"HTTP/1.1 200")
        status, seconds = started.ended(40)
        assert endless.recv(1 << 16).startswith(b"HTTP/1.1 503")
    assert status == 0
    assert seconds < 10
    for answer in requests.wait(5):
        assert answer.status == (200 if answer.streamed else 503), answer
        assert answer.error()["code"] == 503, answer
        assert "shutting down" in answer.error()["message"]
    assert "Traceback" not in started.log.read_text()
    assert wait_for(lambda: not any(map(is_running, started.below)), 5)


# test_outliving.py: on vLLM 0.11
@pytest.mark.parametrize("started", [pytest.param("cpu", marks=pytest.mark.long), *OTHERS], indirect=True)
def test_the_engines_death_is_an_exit_status_and_a_last_line(started: Started) -> None:
    """Stock: exit status 0, which a supervisor takes for a regular end."""
    requests = started.busy()
    os.kill(started.engine, signal.SIGKILL)
    status, seconds = started.ended(40)
    assert status == 1
    assert seconds < 10
    for answer in requests.wait(5):
        assert answer.error()["code"] == 503, answer
        assert answer.error()["message"]
    assert "SIGKILL" in serve_here.likely_reason(started.log)
    assert wait_for(lambda: not any(map(is_running, started.below)), 5)


@pytest.mark.emulated
@pytest.mark.long
def test_ctrl_c_to_several_servers_answers_every_client(model: Path, tmp_path: Path) -> None:
    """It reaches all their processes. Stock 0.23: engines end every request at once, and its begin is the
    answer, 200; a signal to the parent alone kills the servers, and every connection breaks off.
    """
    started = Started(Stack("emulated-9.1"), model, tmp_path / "log", flags=("--api-server-count", "2")).start()
    try:
        told_to_stop(started, lambda: os.killpg(started.process.pid, signal.SIGINT))
    finally:
        serve_here.stop(started.process)
