"""Heartbeat: once a second the engine sends the API server the age of its current step and, when it dies, the cause.

vLLM's server only knows whether the engine's process exists. It notices neither a stopped process nor an endless step,
and knows no cause of death. The message is sent as the result of a utility call that was never made: over vLLM's own
channel and without a question, so that `/health` answers at once however busy the engine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from multiprocessing import connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from npu_gptoss.serving import logger
from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import ALL, CORE

UNTIL = "vLLM's /health asks its engine"
STEP_BEGAN = "_npu_gptoss_step_began"  # of an EngineCore: when its current step began, None between two steps
FIRST_END = "_npu_gptoss_first_end"  # of an EngineCore: how the first of its ranks ended
CALL = -(1 << 40)  # vLLM numbers its calls by time, all above 0, and its notifications -1 (0.23) and -2 (0.33)
INTERVAL = 1.0  # seconds between two messages
SILENCE = 10.0  # seconds without a message after which an engine counts as hung
GRACE = 2.0  # seconds that a silent engine gets when /health asks: the server itself may have been busy


class Pulse:
    """Keeps the engines' last messages. It is registered as a pending utility call, and stays registered."""

    def __init__(self, calls: dict[int, Any]) -> None:
        self._calls = calls
        self._heard: dict[int, tuple[float, float]] = {}  # engine -> (time of the message, age of its step)
        self.cause = ""  # the last error of the engine that died first
        calls[CALL] = self

    def set_result(self, message: list[Any]) -> None:
        """`[engine, seconds of the current step or 0, last error or ""]`."""
        self._calls[CALL] = self  # vLLM removes a call when its result arrives
        engine, seconds, cause = message
        self._heard[engine] = (time.monotonic(), seconds)
        self.cause = self.cause or cause

    def objection(self, longest_step: float) -> str:
        """Returns the reason why requests would not be answered; empty if there is none. `longest_step` in seconds."""
        now = time.monotonic()
        for engine, (when, seconds) in self._heard.items():
            if now - when > SILENCE:
                return f"engine {engine} has been silent for {now - when:.0f} s: its process is stopped or hangs"
            if seconds > longest_step:
                return f"a step of engine {engine} has lasted {seconds:.0f} s, the limit is {longest_step:.0f} s"
        return ""


@repair("engine-pulse-client", "vllm.v1.engine.core_client:MPClient.__init__", releases=ALL, until=UNTIL)
def install_client(core_client: ModuleType) -> None:
    """Same as engine-pulse, in the server's process."""
    client = core_client.MPClient
    expect_source(client.__init__, "self.utility_results: dict[int, AnyFuture] = {}")
    answers = core_client._process_utility_output
    expect_source(answers, "utility_results.pop(output.call_id)", "future.set_result(output.result.result)")

    @around(client, "__init__")
    def __init__(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.npu_gptoss_pulse = Pulse(self.utility_results)
        watch_ends(self.npu_gptoss_pulse, engines(self))


def engines(core: Any) -> Sequence[Any]:
    """Returns the engines' processes that this one has started. core: vLLM's client."""
    return getattr(core.resources.engine_manager, "processes", ())


def watch_ends(pulse: Any, processes: Sequence[Any]) -> None:
    """Starts a thread that notes the first end of these processes, if there are any."""
    if processes:
        told = (pulse, list(processes))
        threading.Thread(target=note_first_end, args=told, name="npu-gptoss ends", daemon=True).start()


def note_first_end(pulse: Any, processes: Sequence[Any]) -> None:
    """Waits until an engine or a worker ends, and keeps a signal as `pulse.cause`: vLLM then ends the others by signals
    of its own, and what they say before is about the lost one."""
    connection.wait([process.sentinel for process in processes])
    while not (ended := [process for process in processes if process.exitcode is not None]):
        time.sleep(0.01)  # vLLM's thread reads it at the same moment
    if ended[0].exitcode <= 0:  # else it has told its error
        quiet = f"its process {ended[0].name} ended with exit status 0, as after SIGTERM"
        pulse.cause = pulse.cause or how_ended(ended) or quiet


async def check(client: Any) -> None:
    """Raises Refusal if an engine of this server exists but does not answer. client: vLLM's engine client.

    vLLM's /health answers 200 for an engine that is stopped or hangs.
    """
    from vllm import envs as vllm_envs

    pulse = getattr(client.engine_core, "npu_gptoss_pulse", None)
    if pulse is None or client.errored:  # vLLM itself answers for a dead engine
        return
    longest = float(vllm_envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    deadline = time.monotonic() + GRACE
    while (reason := pulse.objection(longest)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    if reason:
        logger.warning("npu-gptoss: /health answers 503: %s.", reason)
        raise Refusal(f"The server cannot answer now: {reason}.", status=HTTPStatus.SERVICE_UNAVAILABLE)


def _tell(engine: Any, cause: str = "") -> None:
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput, UtilityResult

    began = getattr(engine, STEP_BEGAN, None)
    seconds = 0.0 if began is None else time.monotonic() - began
    # API servers; from 0.23 on only their addresses are kept
    clients = engine.client_count if hasattr(engine, "client_count") else len(engine.addresses.outputs)
    for client in range(clients):
        output = UtilityOutput(CALL, result=UtilityResult([engine.engine_index, seconds, cause]))
        engine.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))


def how_ended(processes: Iterable[Any]) -> str:
    """Returns in words how the first of them ended that did not end well; empty if all did."""
    stops = (-signal.SIGTERM, -signal.SIGKILL)  # with these vLLM ends a dead worker's neighbours
    ended = (process for process in processes if process.exitcode)
    process = min(ended, key=lambda process: process.exitcode in stops, default=None)
    if process is None:
        return ""
    if process.exitcode > 0:
        return f"its process {process.name} ended with exit status {process.exitcode}"
    number = signal.Signals(-process.exitcode)
    starved = number == signal.SIGKILL and _starved() > _STARVED
    why = " (since the start of this server the kernel has killed a process for lack of memory)" if starved else ""
    return f"its process {process.name} was ended by {number.name}{why}"


def _starved() -> int:
    """Returns how many processes the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M):
            return int(found[1])
    return 0


_STARVED = _starved()


def _workers(engine: Any) -> list[Any]:
    """Returns the processes of an engine's ranks; empty if it computes in its own, or if Ray has started them."""
    workers = getattr(getattr(engine, "model_executor", None), "workers", None) or ()
    return [worker.proc for worker in workers if hasattr(worker, "proc")]


def _lost(engine: Any) -> str:
    """Returns which worker's end has ended the engine, in words: the engine's error is `cancelled` then."""
    if not getattr(getattr(engine, "model_executor", None), "is_failed", False):
        return ""
    if (first := getattr(engine, FIRST_END, None)) is not None and first.cause:
        return first.cause
    words = how_ended(_workers(engine))
    return words and f"{words}; its last log lines say why"


def _beat(reference: Callable[[], Any]) -> None:
    while (engine := reference()) is not None and engine.output_thread.is_alive():
        _tell(engine)
        del engine
        time.sleep(INTERVAL)


@repair(
    "engine-pulse",
    f"{CORE}:EngineCoreProc.process_output_sockets ._process_engine_step ._send_engine_dead",
    releases=ALL,
    until=UNTIL,
)
def install_engine(core: ModuleType) -> None:
    """The server knows neither that its engine hangs nor why it died."""
    proc = core.EngineCoreProc
    expect_source(proc.__init__, "self.output_thread = threading.Thread(", "addresses.outputs")
    expect_source(proc._process_engine_step, "self.step_fn()")
    expect_source(proc._send_engine_dead, "self.output_queue.put_nowait(EngineCoreProc.ENGINE_CORE_DEAD)")

    @around(proc, "process_output_sockets")
    def process_output_sockets(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        """Runs in the engine's output thread, from the end of the constructor on."""
        threading.Thread(target=_beat, args=(weakref.ref(self),), name="npu-gptoss pulse", daemon=True).start()
        first = SimpleNamespace(cause="")
        setattr(self, FIRST_END, first)
        watch_ends(first, _workers(self))
        original(self, *args, **kwargs)

    @around(proc, "_process_engine_step")
    def _process_engine_step(original: Original, self: Any) -> Any:
        setattr(self, STEP_BEGAN, time.monotonic())
        try:
            return original(self)
        finally:
            setattr(self, STEP_BEGAN, None)

    @around(proc, "_send_engine_dead")
    def _send_engine_dead(original: Original, self: Any) -> None:
        error = sys.exc_info()[1]
        words = "" if error is None else f"{type(error).__name__}: {error}"[:1000]
        _tell(self, _lost(self) or words)
        original(self)
