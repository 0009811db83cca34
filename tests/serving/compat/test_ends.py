"""The end of a server, and its port. Real servers: tests/serving/test_shutdown.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import types
import unittest.mock
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi import HTTPException
from fastapi.testclient import TestClient
from vllm.entrypoints.cli import serve
from vllm.v1 import utils
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics import loggers

from npu_gptoss.serving.compat.server import shutdown
from npu_gptoss.serving.compat.server.shutdown import stopping_error
from npu_gptoss.serving.compat.start import ends
from tests.serving.compat import of_release
from tests.serving.compat.of_release import LINE, OLD, server_parser
from tests.serving.in_flight import is_running
from tests.serving.server import free_port, wait_for

if LINE == "0.33":
    from vllm.entrypoints.launchers import launcher
else:
    from vllm.entrypoints import launcher
    from vllm.entrypoints.openai import api_server

only_0_11 = pytest.mark.skipif(not OLD, reason="the repair is for vLLM 0.11")
not_0_11 = pytest.mark.skipif(OLD, reason="the stand-in is of a newer server")
not_0_33 = pytest.mark.skipif(LINE == "0.33", reason="vLLM 0.33 refuses such a port itself")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores this process's handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def dead_core(exitcode: int | None, cause: str | None = None) -> Any:
    """The client of an engine core whose process has ended. cause: None without the repair engine-pulse-client."""
    process = types.SimpleNamespace(name="EngineCore_DP0", exitcode=exitcode)
    manager = types.SimpleNamespace(processes=[process])
    pulse = {} if cause is None else {"npu_gptoss_pulse": types.SimpleNamespace(cause=cause)}
    return types.SimpleNamespace(resources=types.SimpleNamespace(engine_manager=manager), **pulse)


@not_0_33
def test_second_server_does_not_share_the_port(patched: Any) -> None:
    with patched("server-port"), api_server.create_server_socket(("127.0.0.1", 0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(SystemExit, match=f"127.0.0.1 port {port}: Address already in use"):
            api_server.create_server_socket(("127.0.0.1", port))
        with pytest.raises(SystemExit, match="port must be 0-65535"):
            api_server.create_server_socket(("127.0.0.1", 99999))


@not_0_33
def test_invalid_drain_time_is_refused_at_the_start(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GPTOSS_DRAIN_SECONDS", "for ever")
    with patched("server-port"), pytest.raises(SystemExit, match="NPU_GPTOSS_DRAIN_SECONDS='for ever'"):
        api_server.create_server_socket(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("cause", "exitcode", "words"),
    [
        ("ValueError: x\x1b[2J", None, "ValueError: x [2J"),
        ("", -9, "SIGKILL"),
        (None, 3, "exit status 3"),
        ("", None, ""),
    ],
)
def test_last_log_line_names_the_cause_of_death(caplog, monkeypatch, cause, exitcode, words):
    monkeypatch.setattr(shutdown.logger, "propagate", True)
    caplog.set_level("ERROR", logger=shutdown.logger.name)
    caplog.handler.setFormatter(None)
    shutdown.logger.addHandler(caplog.handler)
    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(shutdown._died(types.SimpleNamespace(engine_core=dead_core(exitcode, cause))))
    finally:
        shutdown.logger.removeHandler(caplog.handler)
    assert ended.value.code == 1
    message = caplog.records[0].getMessage()
    assert words in message
    assert message.isprintable()


class Server(uvicorn.Server):
    """Serves nothing until it must exit; then vLLM's application has no state any more."""

    def __init__(self, config: uvicorn.Config, peer_loads: Any = None) -> None:
        super().__init__(config)

    async def serve(self, sockets: Any = None) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)
        del self.config.app.state


def put(server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it the launcher's server, with an application that is none."""
    owner, name = (launcher, "NoSignalServer") if LINE == "0.33" else (launcher.uvicorn, "Server")
    monkeypatch.setattr(owner, name, server)
    monkeypatch.setattr(launcher.uvicorn.Config, "load", lambda self: None)


def ended(monkeypatch: pytest.MonkeyPatch, errored: bool) -> None:
    """Awaits, as vLLM does, a server whose engine dies, or that a program ends."""
    engine = types.SimpleNamespace(errored=errored, is_running=not errored, engine_core=dead_core(-9), vllm_config=None)
    engine.should_keep_api_server_alive = False  # asked by 0.33
    app = types.SimpleNamespace(routes=[], state=types.SimpleNamespace(engine_client=engine))
    put(Server, monkeypatch)

    async def serve() -> None:
        if not errored:
            asyncio.get_running_loop().call_later(0.1, lambda: setattr(app.state.server, "should_exit", True))
        await (await launcher.serve_http(app, None, port=0))

    asyncio.run(asyncio.wait_for(serve(), 20))


@not_0_11
def test_engine_death_gives_exit_status_1_and_a_normal_end_none(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with patched("server-end"):
        with pytest.raises(SystemExit) as end:
            ended(monkeypatch, errored=True)
        assert end.value.code == 1
        ended(monkeypatch, errored=False)


@pytest.mark.parametrize(
    ("exitcode", "words"), [(None, ""), (-9, "VLLM_DP_Coordinator was ended by SIGKILL"), (0, "ended")]
)
def test_engines_without_a_coordinator_let_requests_wait_for_ever(patched, monkeypatch, exitcode, words) -> None:
    """With --data-parallel-size and one API server; /health said 200."""
    core, looked = dead_core(None, ""), []
    engine = types.SimpleNamespace(engine_core=core)
    (process,) = core.resources.engine_manager.processes
    process.is_alive, process.kill = lambda: process.exitcode is None, lambda: setattr(process, "exitcode", -9)
    other = types.SimpleNamespace(name="VLLM_DP_Coordinator", exitcode=None, is_alive=lambda: other.exitcode is None)
    core.resources.coordinator = types.SimpleNamespace(proc=other)
    monkeypatch.setattr(shutdown, "WATCH", 0.01)

    async def three_more() -> None:
        before = len(looked)
        while len(looked) < before + 3:
            await asyncio.sleep(0.01)

    async def looks() -> None:
        task = asyncio.create_task(launcher.watchdog_loop(None, engine))
        await asyncio.wait_for(three_more(), 30)
        other.exitcode = exitcode
        await asyncio.wait_for(three_more(), 30)
        task.cancel()

    with patched("server-end"):
        monkeypatch.setattr(launcher, "terminate_if_errored", lambda *_: looked.append(1))
        asyncio.run(looks())
    assert process.exitcode == (None if exitcode is None else -9)
    assert words in core.npu_gptoss_pulse.cause
    assert len(looked) > 4


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


@not_0_11
@pytest.mark.parametrize(
    ("needs", "seen"),
    [
        (0.2, ["server ended"]),  # the engine's creator ends it later
        (60, [str(stopping_error()()), "aborted ['a']", "server ended"]),
    ],
    ids=["a request finishes", "a longer request gets the error"],
)
def test_signal_leaves_requests_time_to_finish(patched, monkeypatch, handlers, needs, seen) -> None:
    engine = Engine(needs)
    app = types.SimpleNamespace(routes=[], state=types.SimpleNamespace(engine_client=engine))
    monkeypatch.setenv("NPU_GPTOSS_DRAIN_SECONDS", "1")
    put(Busy, monkeypatch)

    async def serve() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await (await launcher.serve_http(app, None, port=0))

    with patched("server-end"):
        asyncio.run(asyncio.wait_for(serve(), 20))
    assert engine.seen == seen
    assert "shutdown" not in vars(engine), "the engine could not be ended any more"


# needs a second for its requests after SIGTERM
SLOW = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit())); print(); time.sleep(60)"


@not_0_11
def test_signal_leaves_several_servers_time_to_finish(patched: Any, handlers: None) -> None:
    server = subprocess.Popen([sys.executable, "-u", "-c", SLOW], stdout=subprocess.PIPE)
    server.stdout.readline()
    manager = object.__new__(utils.APIServerProcessManager)
    manager.processes, manager._address_pipes = [utils._SubprocessWrapper(server, "ApiServer_0")], []
    manager._listeners = []  # of 0.33
    manager._finalizer = weakref.finalize(manager, lambda: None)
    with patched("servers-end"), socket.socket() as manager.sock:
        try:
            manager.shutdown(timeout=0)
            assert server.wait(20) == 0
            assert manager.sock.fileno() == -1, "the port is open, but no server answers"
        finally:
            server.kill()


@pytest.fixture(params=[True, False])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the last line has to say, with or without a reason from the process that failed."""
    monkeypatch.setenv(ends.FILE, str(tmp_path / "tracebacks"))
    return "no kernel" if request.param and ends._written(RuntimeError("no kernel")) else "ended"


def test_a_node_whose_engine_failed_has_a_status_and_a_reason(patched, monkeypatch, handlers, told):
    config = types.SimpleNamespace(parallel_config=unittest.mock.MagicMock(node_rank_within_dp=0), shutdown_timeout=0)
    config.parallel_config.data_parallel_size_local = 1
    options = unittest.mock.MagicMock(data_parallel_hybrid_lb=False)
    options.create_engine_config.return_value = config
    monkeypatch.setattr("vllm.AsyncEngineArgs.from_cli_args", lambda _: options)
    monkeypatch.setattr(serve, "CoreEngineProcManager", unittest.mock.MagicMock())
    monkeypatch.setattr(serve, "Executor", unittest.mock.MagicMock())
    args = unittest.mock.MagicMock(api_server_count=0, reasoning_parser_plugin=None)
    with patched("node-end"), pytest.raises(SystemExit, match=f"vllm serve: .*{told}"):
        serve.run_headless(args)


@not_0_11
@pytest.mark.parametrize("signalled", [True, False])
def test_servers_of_a_supervisor_that_fail_have_a_status(patched, monkeypatch, handlers, told, signalled):
    module = sys.modules[serve.run_dp_supervisor.__module__]
    args = server_parser().parse_args([])
    args.port, args.data_parallel_size_local, args.shutdown_timeout = 1, 2, 0
    args.data_parallel_supervisor_port = free_port()
    args.dp_supervisor_probe_timeout_s = args.dp_supervisor_probe_interval_s = 0.1
    args.dp_supervisor_probe_failure_threshold, args.host = 1, "127.0.0.1"
    monkeypatch.setattr(module, "validate_multi_port_external_lb_args", lambda _: None)
    monkeypatch.setattr(module, "decorate_logs", lambda _: None)

    async def run() -> None:
        supervisor = module.DPSupervisor(args)
        fails = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))

        def start() -> None:
            fails.start()
            fails.join()
            supervisor._processes.append(fails)
            if signalled:
                supervisor._handle_signal(signal.SIGTERM)

        supervisor._start_children = start
        await supervisor.run()

    end = contextlib.nullcontext() if signalled else pytest.raises(SystemExit, match=f"vllm serve: .*{told}")
    with patched("node-end"), end:
        asyncio.run(run())


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


@only_0_11
@pytest.mark.parametrize("error", [stopping_error()(), EngineDeadError()])
def test_answer_cut_by_the_engines_end_gets_503(patched, error):
    with patched("admission"):
        app = of_release.application(of_release.parsed())

        def route(cause: Exception) -> None:
            raise HTTPException(500, detail=str(cause)) from cause

        app.add_api_route("/ended", lambda: route(error))
        app.add_api_route("/failed", lambda: route(ValueError("mine")))
        client = TestClient(app)
        answer = client.get("/ended")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, str(error))
        assert client.get("/failed").status_code == 500


@only_0_11
def test_stream_cut_by_the_engines_end_is_no_bad_request(patched: Any) -> None:
    from vllm.entrypoints.openai.serving_engine import OpenAIServing

    with patched("context-length"):
        serving = types.SimpleNamespace(log_error_stack=False)
        serving.create_error_response = lambda **fields: OpenAIServing.create_error_response(serving, **fields)
        for error in (stopping_error()(), EngineDeadError()):
            told = json.loads(OpenAIServing.create_streaming_error_response(serving, str(error)))["error"]
            assert (told["code"], told["message"]) == (503, str(error))
        assert OpenAIServing.create_error_response(serving, message="mine").error.code == 400


@not_0_11
def test_stream_cut_by_the_engines_end_is_a_503(patched: Any) -> None:
    if LINE == "0.33":
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing as Serving
    else:
        from vllm.entrypoints.openai.engine.serving import OpenAIServing as Serving
    with patched("stream-ends"):
        for error in (stopping_error()(), EngineDeadError()):
            told = json.loads(Serving.create_streaming_error_response(None, error))["error"]
            assert (told["code"], told["message"]) == (503, str(error))


def test_number_that_a_logger_rejects_does_not_end_the_output_task(patched):
    record = Mock(side_effect=ValueError("Counters can only be incremented by non-negative amounts."))
    manager = object.__new__(loggers.StatLoggerManager)
    manager.per_engine_logger_dict = {0: [types.SimpleNamespace(record=record)]}
    manager.prometheus_logger = types.SimpleNamespace(record=record)
    manager.stat_loggers = [types.SimpleNamespace(record=record)]  # 0.23 has this instead of both
    with patched("statistics-errors"):
        manager.record(None, None, engine_idx=0)
