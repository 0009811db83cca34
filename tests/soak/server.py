"""The server under the soak: `vllm serve` on the tiny trained checkpoint, on one of the stacks, and its costs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import psutil
from ascend_emulator import stacks
from ascend_emulator.launch import Machine, environment, find_venv

from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from scripts import serve_here
from tests.serving.server import START_LIMIT, Server, free_port

ROOT = Path(__file__).resolve().parents[2]
NAME = "gpt-oss-tiny"
MODES = {"piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
DEFAULTS = {"emulated": "piecewise", "emulated-9.1": "full"}
# so small a model loses itself in spaces where a grammar allows any number of them
COMPACT = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
EVERY = 1.0  # seconds between two looks at the processes
HEALTH_EVERY = 0.5
ROLES = ("api", "core", "others")
EMULATED = {"emulated": "8.3", "emulated-9.1": "9.1"}  # the emulator's stacks
STACKS = ("cpu", *EMULATED, "cuda")
# several servers on one GPU: a share of its memory, by which vLLM neither measures nor minds the others; the first
# number is what has to be free as one starts
SHARE = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30))


@dataclass(frozen=True)
class Stack:
    """`stack`: of STACKS; `mode`: piecewise or full, of the emulated 910B's graphs."""

    stack: str = "cpu"
    mode: str = ""
    policy: str = "fcfs"

    def __str__(self) -> str:
        return "-".join(filter(None, (self.stack, self.mode, self.policy)))

    @property
    def at_a_time(self) -> int:
        """How many requests the server batches: on the emulated 910B a graph is captured for each size."""
        return 16 if self.stack in EMULATED else {"cpu": 32, "cuda": 64}[self.stack]

    @property
    def rounds(self) -> bool:
        """True where a batch may turn a near-tie: the arithmetic of a row depends on the others there."""
        return self.stack == "cuda"

    def flags(self) -> list[str]:
        graphs = ["--compilation-config", json.dumps({"cudagraph_mode": MODES[self.mode]})] if self.mode else []
        # without bfloat16 instructions the output projection alone takes four times as long in bfloat16
        dtype = ["--dtype", "float32"] if self.stack == "cpu" else []
        batch = ["--max-num-seqs", str(self.at_a_time), "--scheduling-policy", self.policy]
        if self.stack == "cuda":
            sizes = {"cudagraph_capture_sizes": [2**n for n in range(self.at_a_time.bit_length())]}
            graphs = [*SHARE, "--max-model-len", "8192", "--compilation-config", json.dumps(sizes)]
        return [*COMPACT, *batch, *dtype, *graphs]

    def command(self, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
        base = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
        base |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        on, python = "cuda" if self.stack == "cuda" else "cpu", Path(sys.executable)
        if self.stack in EMULATED:
            stack = stacks.named(EMULATED[self.stack])
            place = find_venv(stack=stack)
            base, python = environment(Machine(stack.cann[0]), place, base), place / "bin/python"
        command = serve_here.serve_command(model, NAME, "127.0.0.1", port, self.flags(), on, python)
        variables = serve_here.serving_environment(model, model, base, on)
        del variables[BASE_VARIABLE]  # the plugin has to find the vocabulary
        paths = (str(ROOT), os.environ.get("PYTHONPATH"))  # this tree first, whatever tree the environment knows
        return command, {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextlib.contextmanager
def start(stack: Stack, model: Path, log: Path) -> Iterator[tuple[Server, Popen[bytes]]]:
    """Yields the server when it is ready, and its process; a server that died meanwhile is the caller's finding."""
    port = free_port()
    command, variables = stack.command(model, port)
    process = serve_here.start(command, variables, log)
    try:
        url = f"http://127.0.0.1:{port}"
        serve_here.wait_until_ready(process, url, log, timeout=START_LIMIT * (1 if stack.stack == "cpu" else 2))
        yield Server(url, NAME, log), process
    finally:
        serve_here.stop(process)


def role(process: psutil.Process, root: int) -> str:
    if process.pid == root:
        return "api"
    return "core" if "EngineCore" in " ".join(process.cmdline()) or "EngineCore" in process.name() else "others"


@dataclass
class Sample:
    """One look at the processes. MiB, counts; by role."""

    seconds: float
    done: int
    rss: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]
    gpu: dict[str, float] = field(default_factory=dict)


def gpu_memory() -> dict[str, float]:
    """MiB in use on the first GPU that a server sees, by all processes: within a container none is named."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", first]
    return {"all": float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)}


def look(root: int, seconds: float, done: int, on_gpu: bool = False) -> Sample:
    """The processes of the server by role, without processes that end meanwhile."""
    rss, descriptors, threads = (dict.fromkeys(ROLES, 0) for _ in range(3))
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                name = role(process, root)
                rss[name] += process.memory_info().rss / 2**20
                descriptors[name] += process.num_fds()
                threads[name] += process.num_threads()
    return Sample(seconds, done, rss, descriptors, threads, gpu_memory() if on_gpu else {})


@dataclass
class Watch:
    """Looks at the processes and asks /health from threads, until `close`."""

    url: str
    root: int
    on_gpu: bool = False
    done: int = 0  # kept up to date by the soak
    samples: list[Sample] = field(default_factory=list)
    health: list[float] = field(default_factory=list)  # seconds; infinite where it did not answer 200
    _end: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _begin: float = field(default_factory=time.monotonic)

    def open(self) -> Watch:
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._look, self._ask)]
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(30)

    def _look(self) -> None:
        while not self._end.wait(EVERY):
            self.samples.append(look(self.root, time.monotonic() - self._begin, self.done, self.on_gpu))

    def _ask(self) -> None:
        while not self._end.wait(HEALTH_EVERY):
            begin = time.monotonic()
            try:
                with serve_here.DIRECT.open(f"{self.url}/health", timeout=30) as response:
                    fine = response.status == 200
            except OSError:
                fine = False
            self.health.append(time.monotonic() - begin if fine else float("inf"))


def key_value_use(server: Server) -> dict[str, float]:
    """The metrics that are zero on a server at rest."""
    with urllib.request.urlopen(f"{server.url}/health", timeout=30):
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        return {name: server.metric(f"vllm:{name}") for name in names}
