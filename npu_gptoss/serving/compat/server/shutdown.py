"""Ends the server with an error message for clients, a time limit for requests in flight, and an exit status.

At a signal, vLLM 0.11.0 ends the engine first and then waits for the connections without a limit; 0.23.0 and 0.33.0 end
the requests in flight at once, so that the begin of an answer looks like all of it, and 0.33.0 waits without a limit,
too. All report the engine's death as a regular end (exit status 0).

Here a signal closes the port, gives the requests in flight `NPU_GPTOSS_DRAIN_SECONDS` to finish, ends the rest with an
error, and only then ends the engine. A second signal ends everything at once. Of several API servers (0.23's
`--api-server-count`, and data parallel engines) each does so, and their parent waits for them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import multiprocessing
import os
import signal
from collections.abc import Coroutine
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss import envs
from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.patch import Original, around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.server.heartbeat import engines, how_ended
from npu_gptoss.serving.compat.start import ends
from npu_gptoss.serving.compat.targets import APP_ENTRY, BOTH, LAUNCHER, NEWER, SERVE, SERVERS

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.engine.protocol import EngineClient

WATCH = 0.5  # seconds between two looks at the engine
ARRIVE = 0.5  # seconds in which requests on their way are read; uvicorn cuts connections that have said nothing yet
LAST_WORDS = 1.0  # seconds for the errors to reach the clients; then open connections are cut
GRACE = 5.0  # further seconds until a parent kills its API servers; vLLM's default
ENDS = "vLLM ends its engine last"
STATUS = 1  # of a server whose engine died
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@functools.cache
def stopping_error() -> type[Exception]:
    """Returns the exception for a request that the server ended, as it stops or as an operator pauses its engine."""

    class ServerStoppingError(engine_ended()):
        def __init__(self) -> None:
            Exception.__init__(
                self,
                "The server is shutting down or paused and ended this request before its answer was complete. "
                "Send it again.",
            )

    return ServerStoppingError


def engine_ended() -> type[Exception]:
    """Returns the exception that requests get when the engine or the server ends."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


def is_final(error: object) -> bool:
    """Returns whether the end of the engine, or of the server, caused this error."""
    return isinstance(error, engine_ended())


@repair("server-end", "vllm.entrypoints.launcher:serve_http watchdog_loop", releases=BOTH, until=ENDS)
@repair("server-end", f"{LAUNCHER}:serve_http watchdog_loop", releases="0.33", until=ENDS)
def install_server(launcher: ModuleType) -> None:
    """A signal ends the engine first: answers in flight are cut without a word (0.11, 0.33: or waited for without a
    limit). The engine's death gives exit status 0."""
    serve = launcher.serve_http
    expect_parameters(serve, "sock", "uvicorn_kwargs")
    expect_source(serve, "return dummy_shutdown()", "return server.shutdown()", "app.state.engine_client")
    expect_source(serve, "uvicorn.Config(app, **uvicorn_kwargs)", "loop.create_task(watchdog_loop(server, ")
    expect_source(launcher.watchdog_loop, "terminate_if_errored(server, engine)")

    @around(launcher, "serve_http", copies=(*SERVERS, APP_ENTRY))
    async def serve_http(original: Original, app: FastAPI, *args: Any, **kwargs: Any) -> Coroutine:
        engine = app.state.engine_client
        if engine is None:  # 0.33's server that only renders prompts
            return await original(app, *args, **kwargs)
        # 0.23's own --shutdown-timeout has the same meaning
        own = getattr(engine.vllm_config, "shutdown_timeout", 0) - LAST_WORDS
        drain = max(envs.get("NPU_GPTOSS_DRAIN_SECONDS"), own)
        kwargs.setdefault("timeout_graceful_shutdown", drain + LAST_WORDS)
        loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM)
        # 0.23 would end the engine at the signal, before the answers in flight; vLLM ends it after the server, too
        engine.shutdown = lambda timeout=None: None
        try:
            rest = await original(app, *args, **kwargs)
            if rest.__name__ == "shutdown":  # uvicorn's, not awaited yet: a signal came
                await _stop(rest, engine, drain)
                return _nothing()
        finally:
            del engine.shutdown
        await rest
        return _died(engine) if engine.errored else _nothing()

    @around(launcher, "watchdog_loop")
    async def watchdog_loop(_: Original, server: Any, engine: EngineClient) -> None:
        lost = False
        while True:
            await asyncio.sleep(WATCH)
            before, lost = lost, _coordinator_is_lost(engine.engine_core)
            # at two looks: Ctrl-C in a terminal reaches it before the signal has ended this task
            if before and lost:
                _end_engines(engine.engine_core)
            launcher.terminate_if_errored(server, engine)


def _coordinator_is_lost(core: Any) -> bool:
    """Returns whether the process that starts the steps of data parallel engines has ended, and they have not: vLLM
    does not watch it beside a single API server, and each request after a pause waits for ever. core: vLLM's client."""
    coordinator = getattr(getattr(core, "resources", None), "coordinator", None)
    return coordinator is not None and not coordinator.proc.is_alive() and all(e.is_alive() for e in engines(core))


def _end_engines(core: Any) -> None:
    """Ends the engines in the place of their coordinator, so that its end counts as theirs."""
    process, pulse = core.resources.coordinator.proc, getattr(core, "npu_gptoss_pulse", None)
    if pulse is not None:
        pulse.cause = pulse.cause or how_ended([process]) or f"its process {process.name} ended"
    for engine in engines(core):
        engine.kill()


async def _nothing() -> None:
    pass


async def _stop(shutdown: Coroutine, engine: Any, drain: float) -> None:
    """Waits for the requests in flight, then ends them; the engine must live until this returns."""
    loop = asyncio.get_running_loop()
    one_of_several = multiprocessing.parent_process() is not None  # its parent ends it, and sends this signal on
    for number in SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN if one_of_several else _at_once)
    await asyncio.sleep(ARRIVE)
    count = engine.output_processor.get_num_unfinished_requests()
    logger.info(
        "npu-gptoss: stopping; %d requests in flight have %g s to finish. Another signal ends them at once.",
        count,
        drain,
    )
    ending = asyncio.ensure_future(shutdown)
    await asyncio.wait({ending}, timeout=drain)
    while not ending.done():  # more than once: a request may have been on its way to the engine
        ended = list(engine.output_processor.request_states)
        engine.output_processor.propagate_error(stopping_error()())
        await engine.engine_core.abort_requests_async(ended)  # else 0.23's engine waits --shutdown-timeout for them
        await asyncio.wait({ending}, timeout=0.1)
    await ending


def _at_once(number: int, frame: object) -> None:
    """Ends the engines and API servers that this process has started, and then itself."""
    from npu_gptoss.serving.releases.vllm import kill_process_tree

    for process in multiprocessing.active_children():
        kill_process_tree(process.pid)
    os._exit(128 + number)


@repair("servers-end", "vllm.v1.utils:APIServerProcessManager.shutdown", releases=NEWER, until=ENDS)
def install_servers(managers: ModuleType) -> None:
    """A signal kills several API servers, and their requests are not answered."""
    manager = managers.APIServerProcessManager
    expect_parameters(manager.__init__, "self", "sock")
    expect_source(managers.shutdown, "proc.terminate()", "proc.join(remaining)", "kill_process_tree(pid)")

    @around(manager, "shutdown")
    def shutdown(original: Original, self: Any, timeout: float | None = None) -> None:
        for number in SIGNALS:
            signal.signal(number, _at_once)
        self.sock.close()  # else the kernel accepts connections that no server answers
        original(self, max(timeout or 0, envs.get("NPU_GPTOSS_DRAIN_SECONDS") + LAST_WORDS + GRACE))


_SUPERVISORS = {"0.23": "vllm.entrypoints.openai.dp_supervisor", "0.33": "vllm.entrypoints.launchers.dp_supervisor"}
_OF_SUPERVISOR = ":DPSupervisor.run ._handle_signal"
NODE_ENDS = "vLLM ends a node whose engine failed with another status than 0"


@repair("node-end", f"{SERVE}:run_headless", releases="0.11", until=NODE_ENDS)
@repair("node-end", f"{SERVE}:run_headless", _SUPERVISORS["0.23"] + _OF_SUPERVISOR, releases="0.23", until=NODE_ENDS)
@repair("node-end", f"{SERVE}:run_headless", _SUPERVISORS["0.33"] + _OF_SUPERVISOR, releases="0.33", until=NODE_ENDS)
def install_node(serve: ModuleType) -> None:
    """A node with `--headless`, and the supervisor of `--data-parallel-multi-port-external-lb`, end with exit status 0
    when an engine or server of theirs has failed."""
    expect_source(serve.run_headless, "raise SystemExit", "executor_class=Executor.get_class(vllm_config)")

    @around(serve, "run_headless")
    def run_headless(original: Original, args: Any) -> None:
        original(args)  # at a signal it raises
        raise SystemExit(ends.last_words("an engine of this node has ended; its last log lines say why"))

    if (name := getattr(getattr(serve, "run_dp_supervisor", None), "__module__", None)) is None:  # 0.11 has none
        return
    supervisor = importlib.import_module(name).DPSupervisor
    expect_source(supervisor.run, "await self._shutdown_children()")

    @around(supervisor, "_handle_signal")
    def handle_signal(original: Original, self: Any, signum: int) -> None:
        self.npu_gptoss_stopped = True
        original(self, signum)

    @around(supervisor, "run")
    async def run(original: Original, self: Any) -> None:
        await original(self)
        if not hasattr(self, "npu_gptoss_stopped"):
            raise SystemExit(ends.last_words(how_ended(self._processes) or "a server does not answer"))


def cause_of_death(core: Any) -> str:
    """Returns the engine's last error, or the signal or status with which its process ended. core: vLLM's client."""
    if gave_up := getattr(core, "gave_up", ""):  # of restart.py
        return gave_up
    pulse = getattr(core, "npu_gptoss_pulse", None)
    if pulse is not None and pulse.cause:
        return pulse.cause
    return how_ended(engines(core)) or "the cause is unknown; read its last log lines above"


async def _died(engine: Any) -> None:
    """Logs the cause and exits. Awaited last, when everything is closed."""
    cause = "".join(c if c.isprintable() else " " for c in cause_of_death(engine.engine_core))
    logger.error("npu-gptoss: the engine died: %s. The server ends with exit status %d.", cause, STATUS)
    raise SystemExit(STATUS)
