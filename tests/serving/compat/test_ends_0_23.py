"""The end of a server of vLLM 0.23, and of several. Real servers: tests/serving/test_shutdown.py."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import types
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.chat_completion.stream_harmony", reason="needs vLLM 0.23")

import uvicorn
from vllm.entrypoints import launcher
from vllm.v1 import utils

from npu_gptoss.serving.compat.server.shutdown import stopping_error
from tests.serving.compat.test_ends import dead_core
from tests.serving.in_flight import is_running
from tests.serving.server import wait_for

pytestmark = pytest.mark.serving


class Server(uvicorn.Server):
    """Serves nothing until it must exit; then vLLM's application has no state any more."""

    async def serve(self, sockets: Any = None) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)
        del self.config.app.state


def ended(monkeypatch: pytest.MonkeyPatch, errored: bool) -> None:
    """Awaits, as vLLM does, a server whose engine dies, or that a program ends."""
    engine = types.SimpleNamespace(errored=errored, is_running=not errored, engine_core=dead_core(-9), vllm_config=None)
    app = types.SimpleNamespace(routes=[], state=types.SimpleNamespace(engine_client=engine))
    monkeypatch.setattr(launcher.uvicorn, "Server", Server)
    monkeypatch.setattr(launcher.uvicorn.Config, "load", lambda self: None)

    async def serve() -> None:
        if not errored:
            asyncio.get_running_loop().call_later(0.1, lambda: setattr(app.state.server, "should_exit", True))
        await (await launcher.serve_http(app, None, port=0))

    asyncio.run(asyncio.wait_for(serve(), 20))


def test_engine_death_gives_exit_status_1_and_a_normal_end_none(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with patched("server-end"):
        with pytest.raises(SystemExit) as end:
            ended(monkeypatch, errored=True)
        assert end.value.code == 1
        ended(monkeypatch, errored=False)


class Engine:
    """Answers a request `needs` seconds after the server's end began; `seen` records the events in order."""

    vllm_config = types.SimpleNamespace(shutdown_timeout=0)
    errored, is_running = False, True

    def __init__(self, needs: float) -> None:
        self.needs, self.seen = needs, []
        self.engine_core = types.SimpleNamespace(abort_requests_async=self.abort)
        self.output_processor = types.SimpleNamespace(
            request_states={"a": None},
            get_num_unfinished_requests=lambda: 1,
            propagate_error=lambda error: self.seen.append(str(error)),
        )

    async def abort(self, request_ids: list[str]) -> None:
        self.seen.append(f"aborted {request_ids}")

    def shutdown(self, timeout: float | None = None) -> None:
        self.seen.append("engine ended")


class Busy(Server):
    """Its end waits for the engine's request."""

    async def shutdown(self, sockets: Any = None) -> None:
        engine = self.config.app.state.engine_client
        deadline = asyncio.get_running_loop().time() + engine.needs
        while not engine.seen and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        engine.seen.append("server ended")


@pytest.mark.parametrize(
    ("needs", "seen"),
    [
        (0.2, ["server ended"]),  # the engine's creator ends it later
        (60, [str(stopping_error()()), "aborted ['a']", "server ended"]),
    ],
    ids=["a request finishes", "a longer request gets the error"],
)
def test_signal_leaves_requests_time_to_finish(
    patched: Any, monkeypatch: pytest.MonkeyPatch, needs: float, seen: list[str]
) -> None:
    engine = Engine(needs)
    app = types.SimpleNamespace(routes=[], state=types.SimpleNamespace(engine_client=engine))
    monkeypatch.setenv("NPU_GPTOSS_DRAIN_SECONDS", "1")
    monkeypatch.setattr(launcher.uvicorn, "Server", Busy)
    monkeypatch.setattr(launcher.uvicorn.Config, "load", lambda self: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    async def serve() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await (await launcher.serve_http(app, None, port=0))

    try:
        with patched("server-end"):
            asyncio.run(asyncio.wait_for(serve(), 20))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert engine.seen == seen
    assert "shutdown" not in vars(engine), "the engine could not be ended any more"


# needs a second for its requests after SIGTERM
SLOW = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit())); print(); time.sleep(60)"


def test_signal_leaves_several_servers_time_to_finish(patched: Any) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    server = subprocess.Popen([sys.executable, "-u", "-c", SLOW], stdout=subprocess.PIPE)
    server.stdout.readline()
    manager = object.__new__(utils.APIServerProcessManager)
    manager.processes, manager._address_pipes = [utils._SubprocessWrapper(server, "ApiServer_0")], []
    manager._finalizer = weakref.finalize(manager, lambda: None)
    with patched("servers-end"), socket.socket() as manager.sock:
        try:
            manager.shutdown(timeout=0)
            assert server.wait(20) == 0
            assert manager.sock.fileno() == -1, "the port is open, but no server answers"
        finally:
            server.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def test_second_signal_ends_all_servers_and_engines_at_once(tmp_path: Path) -> None:
    code = """
        import multiprocessing, signal, time
        from npu_gptoss.serving.compat.server import shutdown
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        print("child", child.pid, flush=True)
        signal.signal(signal.SIGTERM, shutdown._at_once)
        signal.raise_signal(signal.SIGTERM)
    """
    log = tmp_path / "log"  # not a pipe: the child keeps it open until its own end
    with log.open("w") as output:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        status = subprocess.run(command, stdout=output, stderr=output, timeout=120).returncode
    said = log.read_text()
    assert status == 128 + signal.SIGTERM, said
    child = int(said.partition("child ")[2].split()[0])
    assert wait_for(lambda: not is_running(child), 5)
