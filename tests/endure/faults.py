"""Faults provoked under load: what clients see, after how long, and what is left behind.

    python -m tests.endure.faults --out docs/benchmarks/faults.json
    python -m tests.endure.faults --only "SIGKILL of the engine"
    python -m tests.endure.faults --table docs/benchmarks/faults.json

As root on Linux: a full disk and a full /dev/shm are small tmpfs in a mount namespace of the server's own. The jump of
the clock needs Debian's libfaketime.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from npu_gptoss.errors import InputError
from npu_gptoss.files import write_atomically
from scripts import serve_here
from tests.endure.loop import UNSERVED, Loop
from tests.endure.scenarios import SCENARIOS
from tests.endure.server import Served, Stack, role

BEFORE, AFTER = 4.0, 10.0  # seconds of load before a fault, and after its end
PATIENCE = 60.0  # of a client
IN_FLIGHT = 8
LOAD = "short"
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


CPU = Stack()


@dataclass(frozen=True)
class Fault:
    """do: provokes it, and ends it again. ends: the server may end by it. refuses: it may refuse clients meanwhile."""

    do: Callable[[Served, Path], Awaitable[None]]
    ends: bool = False
    refuses: bool = False
    stack: Stack = CPU
    before: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    lacks: str = ""  # why it cannot be provoked here


@dataclass
class Seen:
    """One fault, as written down. seconds: from the fault until the last client that got an error has it."""

    fault: str
    stack: str
    equal: int
    told: int
    wrong: int
    errors: list[str]
    seconds: float
    server: str
    left: list[str]


def processes(served: Served, who: str) -> list[psutil.Process]:
    """Those of a role; `worker`: ranks, which vLLM starts below the engine."""
    root = psutil.Process(served.process.pid)
    everyone = [root, *root.children(recursive=True)]
    if who == "worker":
        return [one for one in everyone if "Worker" in " ".join(one.cmdline()) or "Worker" in one.name()]
    return [one for one in everyone if role(one, root.pid) == who]


def send(number: signal.Signals, who: str, seconds: float = 0) -> Callable[[Served, Path], Awaitable[None]]:
    """A signal to the first process of a role; SIGCONT after some seconds."""

    async def do(served: Served, folder: Path) -> None:
        one = processes(served, who)[0]
        one.send_signal(number)
        if seconds:
            await asyncio.sleep(seconds)
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)

    return do


def limited(what: int, who: str, most: Callable[[psutil.Process], int]):
    """A lower limit of resources for ten seconds."""

    async def do(served: Served, folder: Path) -> None:
        one = processes(served, who)[0]
        before = one.rlimit(what)
        one.rlimit(what, (most(one), before[1]))
        await asyncio.sleep(10)
        with contextlib.suppress(psutil.NoSuchProcess):
            one.rlimit(what, before)

    return do


async def idle(served: Served, folder: Path, number: int = 10_000, seconds: float = 10) -> None:
    """So many connections that say nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    made: list[socket.socket] = []
    try:
        for count in range(number):
            made.append(socket.create_connection(("127.0.0.1", served.port), timeout=10))
            if count % 50 == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(seconds)
    finally:
        for one in made:
            one.close()


async def filled(served: Served, folder: Path) -> None:
    """The file systems that are the server's own: of its log and of /dev/shm, through its root."""
    root = Path(f"/proc/{processes(served, 'api')[0].pid}/root")
    fillers = [root / "dev/shm/filler", root / str(folder / "small/filler").lstrip("/")]
    for filler in fillers:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    await asyncio.sleep(8)
    for filler in fillers:
        with contextlib.suppress(OSError):
            filler.unlink()


async def jumps(served: Served, folder: Path) -> None:
    """An hour forwards, then two days back."""
    for offset in ("+1h", "-2d"):
        (folder / "clock").write_text(offset)
        await asyncio.sleep(5)
    (folder / "clock").write_text("+0")


async def hoards(served: Served, folder: Path) -> None:
    """Another process takes all of the GPU's free memory for 10 s."""
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", HOARD], check=True, timeout=60)


# FOLDER is replaced by the run's folder
SMALL = (
    "mount -t tmpfs -o size=16m tmpfs /dev/shm && mount -t tmpfs -o size=256k tmpfs FOLDER/small && "
    'exec "$@" >FOLDER/small/log 2>&1'
)
OWN = ("unshare", "-m", "sh", "-c", SMALL, "sh")
CLOCK = (
    ("LD_PRELOAD", str(FAKETIME[0]) if FAKETIME else ""),
    ("FAKETIME_TIMESTAMP_FILE", "FOLDER/clock"),
    *(("FAKETIME_NO_CACHE", "1"), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")),
)
# In each process of the server SIGUSR1 writes to an address of the GPU that is nobody's: the context is lost.
ILLEGAL = """
import signal
import triton, triton.language as tl
@triton.jit
def store(at):
    tl.store(at.to(tl.pointer_type(tl.int32)), 1)
signal.signal(signal.SIGUSR1, lambda *_: store[(1,)](1 << 60))
"""
INJECTED = ("sh", "-c", 'PYTHONPATH=FOLDER/injected:$PYTHONPATH exec "$@"', "sh")
HOARD = """
import time, torch
held = []
for size in (1 << 30, 1 << 24):
    try:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
time.sleep(10)
"""
GPU = {
    "stack": Stack("cuda"),
    "variables": (("VLLM_BATCH_INVARIANT", "1"),),  # answers in a batch are those alone
    "lacks": "" if shutil.which("nvidia-smi") else "no NVIDIA GPU is here",
}
TWO = Stack("emulated-9.1", devices=2)
FAULTS: dict[str, Fault] = {
    "SIGKILL of the engine": Fault(send(signal.SIGKILL, "core"), ends=True),
    "SIGKILL of the API server": Fault(send(signal.SIGKILL, "api"), ends=True),
    "SIGSTOP of the engine for 15 s": Fault(send(signal.SIGSTOP, "core", 15)),
    "SIGSTOP of the API server for 15 s": Fault(send(signal.SIGSTOP, "api", 15)),
    "10 000 idle connections": Fault(idle),
    "no descriptor left in the API server for 10 s": Fault(
        limited(resource.RLIMIT_NOFILE, "api", lambda one: one.num_fds()), refuses=True
    ),
    "no memory for the engine for 10 s": Fault(
        limited(resource.RLIMIT_AS, "core", lambda one: one.memory_info().vms), ends=True
    ),
    "full /dev/shm and a full disk under the log for 8 s": Fault(filled, before=OWN),
    "the clock jumps 1 h forwards, 2 days back": Fault(
        jumps, variables=CLOCK, lacks="" if FAKETIME else "libfaketime is not installed"
    ),
    "SIGKILL of a rank of two": Fault(send(signal.SIGKILL, "worker"), ends=True, stack=TWO),
    "SIGSTOP of a rank of two (a silent HCCL peer) for 15 s": Fault(send(signal.SIGSTOP, "worker", 15), stack=TWO),
    "SIGKILL of the engine of a GPU": Fault(send(signal.SIGKILL, "core"), ends=True, **GPU),
    "an illegal address in a kernel": Fault(send(signal.SIGUSR1, "core"), ends=True, before=INJECTED, **GPU),
    "another process takes all memory of the GPU": Fault(hoards, **GPU),
}


async def under_load(served: Served, fault: Fault, folder: Path) -> tuple[Loop, float]:
    loop, scenario = Loop(served.url, 1, patience=PATIENCE), SCENARIOS[LOAD]
    await loop.take_answers(scenario, 100)
    rest = asyncio.Event()
    load = asyncio.create_task(
        loop.run(scenario, 600, in_flight=IN_FLIGHT, alive=lambda: served.process.poll() is None and not rest.is_set())
    )
    await asyncio.sleep(BEFORE)
    begin, loop.outage = time.monotonic(), int(fault.ends or fault.refuses)
    loop.outages += loop.outage
    await fault.do(served, folder)
    if fault.ends:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(served.process.wait, 30)
        await asyncio.sleep(1)
    loop.outage = 0
    if served.process.poll() is None:
        await asyncio.sleep(AFTER)
    rest.set()
    await load
    return loop, begin


def provoke(name: str, fault: Fault, model: Path) -> Seen:
    with tempfile.TemporaryDirectory(prefix="faults") as place:
        folder = Path(place)
        (folder / "small").mkdir()
        (folder / "clock").write_text("+0")
        (folder / "injected").mkdir()
        (folder / "injected/sitecustomize.py").write_text(ILLEGAL)
        before = tuple(word.replace("FOLDER", place) for word in fault.before)
        variables = {key: value.replace("FOLDER", place) for key, value in fault.variables}
        served = Served(fault.stack, model, folder / "log", before, variables).start()
        try:
            loop, begin = asyncio.run(under_load(served, fault, folder))
        finally:
            died = served.process.poll()
            left = served.stop()
        reason = serve_here.likely_reason(folder / "log")
    found, errors = loop.findings, [(at, words) for at, words in loop.findings.errors if at >= begin]
    heads = Counter(re.sub(r"\d{3,}|0x\w+", "…", words)[:160] for _, words in errors)
    told = found.number("honest", UNSERVED)
    equal = found.number("honest", "equal")
    return Seen(
        fault=name,
        stack=str(fault.stack),
        equal=equal,
        told=told,
        wrong=found.number("honest") - equal - told,
        errors=[f"{n} × {words}" for words, n in heads.most_common(4)],
        seconds=round(max((at for at, _ in errors), default=begin) - begin, 1),
        server="serves on" if died is None else f"ends with {died}: {reason}"[:200],
        left=left,
    )


def table(seen: Sequence[Seen]) -> str:
    rows = ["| fault | server | answers equal | told | wrong | after | the server | left |", "|" + " --- |" * 8]
    for one in seen:
        after = f"{one.seconds} s" if one.errors else "–"
        end = re.sub(r"[|`]", "", one.server)[:90]
        cells = (one.fault, one.stack, one.equal, one.told, one.wrong, after, end, len(one.left))
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="faults whose name has this")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults.json"))
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print its table, provoke nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(load(options.table)))
        return 0
    seen = {one.fault: one for one in load(options.out)} if options.out.exists() else {}
    for name, fault in FAULTS.items():
        if options.only and options.only not in name:
            continue
        if fault.lacks:
            print(f"{name}: not provoked: {fault.lacks}", flush=True)
            continue
        print(f"{name} …", flush=True)
        try:
            seen[name] = provoke(name, fault, serve_here.tiny_checkpoint())
        except InputError as error:
            print(f"{name}: no server: {error}", file=sys.stderr, flush=True)
            continue
        print(json.dumps(asdict(seen[name]), indent=1), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        ordered = [asdict(seen[name]) for name in FAULTS if name in seen]
        write_atomically(options.out, (json.dumps(ordered, indent=1) + "\n").encode())
    return int(any(one.wrong or one.left for one in seen.values()))


def load(path: Path) -> list[Seen]:
    return [Seen(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.exit(main())
