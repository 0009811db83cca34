"""A silent engine is not healthy, a busy engine is; engines and workers end with their parent."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest
from vllm.v1 import engine as vllm_engine
from vllm.v1.engine import EngineCoreOutputs, core, core_client
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.server import heartbeat as pulse
from npu_gptoss.serving.compat.server.admission import VllmServer
from tests.serving.compat.of_release import LINE, OLD
from tests.serving.in_flight import is_running
from tests.serving.server import wait_for


class Engine(types.SimpleNamespace):
    """Can be referred to weakly."""


def engine(**fields: Any) -> Any:
    values = {"engine_index": 0, "output_queue": queue.Queue(), **fields}
    values |= {"client_count": 1} if OLD else {"addresses": types.SimpleNamespace(outputs=["the server's"])}
    return Engine(**values)


def delivered(of: Any, calls: dict[int, Any]) -> None:
    """Sends the engine's queued messages through vLLM's serialisation to vLLM's own reader."""
    while not of.output_queue.empty():
        message = of.output_queue.get()
        if message == core.EngineCoreProc.ENGINE_CORE_DEAD:
            return
        _, output = message
        received: EngineCoreOutputs = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(output))
        core_client._process_utility_output(received.utility_output, calls)


def test_unrequested_message_leaves_real_calls_alone() -> None:
    calls: dict[int, Any] = {}
    heart = pulse.Pulse(calls)
    asked = asyncio.Future(loop=asyncio.new_event_loop())
    calls[7] = asked
    it = engine()
    for _ in range(3):
        pulse._tell(it)
    delivered(it, calls)
    assert heart.objection(300) == ""
    assert calls == {pulse.CALL: heart, 7: asked}


def test_call_number_is_none_of_vllms_own() -> None:
    """Servers of 0.23's data parallel engines would treat the first message as the engine's death, and 0.33's would
    keep each as the state of a fault, unread by /health."""
    vllms = {value for name, value in vars(vllm_engine).items() if name.endswith("_CALL_ID")}
    assert len(vllms) == {"0.11": 0, "0.23": 1, "0.33": 2}[LINE]
    assert pulse.CALL not in vllms
    assert pulse.CALL < 0


@pytest.mark.parametrize(
    ("silent", "step", "words"),
    [(0.0, 0.0, ""), (9.0, 299.0, ""), (11.0, 0.0, "silent for 11 s"), (0.0, 301.0, "has lasted 301 s")],
)
def test_busy_engine_is_healthy_and_a_hung_engine_is_not(monkeypatch, silent, step, words) -> None:
    heart = pulse.Pulse({})
    now = time.monotonic()
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now)
    heart.set_result([0, step, ""])
    heart.set_result([1, 0.0, ""])
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now + silent)
    if not silent:
        assert heart.objection(300) == "" if not words else words in heart.objection(300)
        return
    heart.set_result([1, 0.0, ""])  # a message of another engine does not count
    assert (words in heart.objection(300)) if words else heart.objection(300) == ""


def test_heartbeat_carries_the_age_of_a_step_and_the_cause_of_death(patched: Any) -> None:
    seen: list[float] = []
    heart = pulse.Pulse(calls := {})

    class Thread:
        def join(self, timeout: float) -> None: ...
        def is_alive(self) -> bool:
            return False

    def step() -> None:
        time.sleep(0.05)
        pulse._tell(it)
        delivered(it, calls)
        seen.append(heart._heard[0][1])
        raise MemoryError("no room for\x1b[2J 7 pages")

    it = engine(step_fn=step, output_thread=Thread())
    with patched("engine-pulse"):
        with pytest.raises(MemoryError):
            core.EngineCoreProc._process_engine_step(it)
        try:
            step()
        except MemoryError:
            core.EngineCoreProc._send_engine_dead(it)
    delivered(it, calls)
    assert seen[0] >= 0.05
    assert seen[1] == 0, "no step runs"
    assert heart.cause == "MemoryError: no room for\x1b[2J 7 pages"


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ((-9, 1), "two ended with exit status 1"),
        ((-15, -11), "two was ended by SIGSEGV"),
        ((0, -9), "two was ended by SIGKILL"),
    ],
)
def test_a_lost_worker_is_the_cause_of_death_not_cancelled(patched: Any, codes: Any, words: str) -> None:
    """vLLM ends the other workers, and the engine's own error says `cancelled`."""
    heart = pulse.Pulse(calls := {})
    ended = [types.SimpleNamespace(name=name, exitcode=code) for name, code in zip(("one", "two"), codes, strict=True)]
    workers = [types.SimpleNamespace(proc=process) for process in ended]
    it = engine(model_executor=types.SimpleNamespace(is_failed=True, workers=workers))
    it.output_thread = types.SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)
    with patched("engine-pulse"):
        try:
            raise RuntimeError("cancelled")
        except RuntimeError:
            core.EngineCoreProc._send_engine_dead(it)
    delivered(it, calls)
    assert words in heart.cause


def test_a_killed_rank_is_the_cause_not_the_rank_that_lost_it(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank ends with an error of its own, about a connection."""
    heart = pulse.Pulse(calls := {})
    fork = multiprocessing.get_context("fork")
    told = fork.Event()
    lost = fork.Process(target=lambda: told.wait(60) and sys.exit(1), name="lost")
    killed = fork.Process(target=time.sleep, args=(60,), name="killed")
    for process in (lost, killed):
        process.start()
    workers = [types.SimpleNamespace(proc=process) for process in (lost, killed)]
    it = engine(model_executor=types.SimpleNamespace(is_failed=True, workers=workers))
    it.output_thread = types.SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False)
    monkeypatch.setattr(core.EngineCoreProc, "process_output_sockets", lambda self: None)
    with patched("engine-pulse"):
        core.EngineCoreProc.process_output_sockets(it)
        killed.kill()
        assert wait_for(lambda: getattr(it, pulse.FIRST_END).cause, 10)
        told.set()
        lost.join(10)
        core.EngineCoreProc._send_engine_dead(it)
    delivered(it, calls)
    assert lost.exitcode == 1
    assert heart.cause.startswith("its process killed was ended by SIGKILL")


def test_health_fails_for_an_engine_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(pulse, "GRACE", 0.3)
    monkeypatch.setattr(pulse, "SILENCE", 0.1)
    heart = pulse.Pulse({})
    heart.set_result([0, 0.0, ""])
    llm = types.SimpleNamespace(errored=False, engine_core=types.SimpleNamespace(npu_gptoss_pulse=heart))
    server = VllmServer(types.SimpleNamespace(engine_client=llm), types.SimpleNamespace())
    time.sleep(0.2)
    with pytest.raises(Refusal, match="engine 0 has been silent") as refused:
        asyncio.run(server.check_engine(waits=False))
    assert refused.value.status == 503

    async def late() -> None:
        asyncio.get_running_loop().call_later(0.1, heart.set_result, [0, 0.0, ""])
        await server.check_engine(waits=False)

    asyncio.run(late())  # the server itself was busy


ORPHAN = """
import multiprocessing, os, signal, sys, time
from npu_gptoss.serving import children
children.LAST_WILL = 0.5
children.install()

def child(stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"%d\\n" % os.getpid())  # at once: two children write
    time.sleep(30)

if __name__ == "__main__":
    for stubborn in (False, True):
        multiprocessing.get_context("fork").Process(target=child, args=(stubborn,), name=sys.argv[1]).start()
    time.sleep(30)
"""


@pytest.mark.parametrize(("name", "left"), [("EngineCore_DP0", 0), ("VllmWorker-1", 0), ("Process-1", 2)])
def test_engine_ends_with_its_server_but_a_users_process_does_not(name: str, left: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHAN, name], stdout=subprocess.PIPE, text=True)
    children = [int(process.stdout.readline()) for _ in range(2)]
    try:
        process.kill()
        process.wait()
        if left:
            time.sleep(0.5)
        assert wait_for(lambda: sum(map(is_running, children)) == left, 5)
    finally:
        process.stdout.close()
        for child in filter(is_running, children):
            os.kill(child, signal.SIGKILL)


INTERRUPTED = """
import multiprocessing, os, signal, sys, time
from npu_gptoss.serving import children
children.install()

def child():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)

process = multiprocessing.get_context("fork").Process(target=child, name=sys.argv[1])
process.start()
process.join()
print(process.exitcode)
"""


@pytest.mark.parametrize(("name", "status"), [("EngineCore_DP0", 0), ("VllmWorker-1", 0), ("Process-1", -2)])
def test_interrupt_ends_a_users_process_but_no_engine(name, status):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, name], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1:] == [str(status)], done.stderr


def _engine(ready: Any) -> None:
    """An engine of vLLM's: SIGTERM is a regular end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGTERM, "EngineCore_DP1 ended"), (signal.SIGKILL, "EngineCore_DP1 was ended by")]
)
def test_signal_to_one_engine_is_told_as_its_neighbours_end(number: int, words: str) -> None:
    """vLLM kills the engines that wait for the lost one in a step, and these complain of its connection."""
    fork = multiprocessing.get_context("fork")
    ready = [fork.Event(), fork.Event()]
    engines = [fork.Process(target=_engine, args=(each,), name=f"EngineCore_DP{n}") for n, each in enumerate(ready)]
    for each, begun in zip(engines, ready, strict=True):
        each.start()
        assert begun.wait(30)
    heart = pulse.Pulse({})
    noting = threading.Thread(target=pulse.note_first_end, args=(heart, engines))
    noting.start()
    os.kill(engines[1].pid, number)
    noting.join(10)
    heart.set_result([0, 0, "RuntimeError: Connection closed by peer"])
    engines[0].kill()
    engines[0].join()
    assert words in heart.cause
    assert "memory" not in heart.cause
    assert "memory" not in pulse.how_ended(engines)


def test_lack_of_memory_is_told_that_the_kernel_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = types.SimpleNamespace(name="EngineCore", exitcode=-signal.SIGKILL)
    for before, told in ((pulse._starved(), False), (pulse._starved() - 1, True)):
        monkeypatch.setattr(pulse, "_STARVED", before)
        assert ("memory" in pulse.how_ended([killed])) == told


def test_first_end_of_an_engine_is_not_watched(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="EngineCore_DP0")
    process.start()

    def made(self: Any) -> None:
        self.utility_results: dict[int, Any] = {}
        self.resources = types.SimpleNamespace(engine_manager=types.SimpleNamespace(processes=[process]))

    with patched(), monkeypatch.context() as patching:
        patching.setattr(core_client.MPClient, "__init__", made)
        patching.setattr(pulse, "expect_source", lambda *_: None)
        pulse.install_client(core_client)
        client = object.__new__(core_client.MPClient)
        client.__init__()
    process.kill()
    assert wait_for(lambda: "EngineCore_DP0" in client.npu_gptoss_pulse.cause, 10)
