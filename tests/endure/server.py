"""The server of the endurance runs: `vllm serve` of the tiny trained checkpoint on one of the stacks, and its costs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import psutil
from ascend_emulator import cards, stacks
from ascend_emulator.launch import Machine, environment, find_venv

from emulator.tests.test_triton import PACKAGES
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from research.eagle3_head import write_head
from scripts import serve_here
from tests.serving import on_cpu
from tests.serving.server import START_LIMIT, Server, free_port

ROOT = Path(__file__).resolve().parents[2]
NAME = "gpt-oss-tiny"
MODES = {"piecewise": "PIECEWISE", "full": "FULL_DECODE_ONLY"}
# so small a model loses itself in spaces where a grammar allows any number of them
COMPACT = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFTERS = {"ngrams": "drafts", "eagle3": "eagle3"}  # with their names in a record
LOOK_EVERY = 1.0  # seconds between two looks at the processes
ASK_EVERY = 10.0  # between two of /health and /metrics
# the emulator's stacks and cards
EMULATED = {"emulated": ("8.3", cards.DEFAULT.name), "emulated-9.1": ("9.1", cards.DEFAULT.name)}
EMULATED |= {f"{name}-a3": (release, "A3") for name, (release, _) in EMULATED.items()}
CPU_0_33 = "cpu-0.33"  # vLLM 0.33's processes with a worker for CPUs
STACKS = ("cpu", CPU_0_33, *EMULATED, "cuda")
# several servers on one machine. On a GPU a share of its memory, by which vLLM neither measures nor minds the others;
# the first number is what has to be free as one starts. A KV cache of an emulated card takes the machine's memory
KEYS = ("--kv-cache-memory-bytes", str(1 << 30))
SHARE = ("--gpu-memory-utilization", "0.05", *KEYS)
COUNTER = re.compile(r"^([\w:]+(?:_total|_count|_sum|_bucket)(?:\{.*?\})?) (\S+)$", re.M)


@dataclass(frozen=True)
class Stack:
    """`stack`: of STACKS; `mode`: piecewise or full, of the emulated 910B's graphs; "" is what its release chooses."""

    stack: str = "cpu"
    mode: str = ""
    policy: str = "fcfs"
    devices: int = 1  # of tensor parallelism
    drafts: str = ""  # of DRAFTERS: who proposes tokens

    def __str__(self) -> str:
        ranks = f"tp{self.devices}" if self.devices > 1 else ""
        return "-".join(filter(None, (self.stack, self.mode, DRAFTERS.get(self.drafts), self.policy, ranks)))

    @property
    def at_a_time(self) -> int:
        """How many requests the server batches: on the emulated 910B a graph is captured for each size."""
        return 16 if self.stack in EMULATED else 64 if self.stack == "cuda" else 32

    @property
    def rounds(self) -> bool:
        """True where a batch may turn a near-tie: the arithmetic of a row depends on the others there."""
        return bool(self.card)  # on emulated ones in products of one row, in fp32

    @property
    def card(self) -> str:
        return "gpu" if self.stack == "cuda" else "emulated" if self.stack in EMULATED else ""

    @property
    def sleeps(self) -> bool:
        """True where `changes` puts the server to sleep; the CPU refuses the option."""
        return self.card == "emulated"

    def changes(self) -> dict[str, Any]:
        """Fields of a `Served` whose operator may change it."""
        nz = {"VLLM_ASCEND_ENABLE_NZ": "0"} if self.sleeps else {}
        return {"variables": {"VLLM_SERVER_DEV_MODE": "1", **nz}, "flags": ("--enable-sleep-mode",) * self.sleeps}

    def flags(self) -> list[str]:
        graphs = ["--compilation-config", json.dumps({"cudagraph_mode": MODES[self.mode]})] if self.mode else []
        # without bfloat16 instructions the output projection alone takes four times as long in bfloat16
        dtype = ["--dtype", "float32"] if self.stack == "cpu" else []
        batch = ["--max-num-seqs", str(self.at_a_time), "--scheduling-policy", self.policy]
        if self.stack == "cuda":
            sizes = {"cudagraph_capture_sizes": [2**n for n in range(self.at_a_time.bit_length())]}
            graphs = [*SHARE, "--max-model-len", "8192", "--compilation-config", json.dumps(sizes)]
        elif EMULATED.get(self.stack, ("",))[0] == "9.1":  # vllm-ascend 0.11 knows no such number
            batch += KEYS
        ranks = ["--tensor-parallel-size", str(self.devices)] if self.devices > 1 else []
        return [*COMPACT, *batch, *dtype, *graphs, *ranks]

    def drafter(self, model: Path) -> list[str]:
        """Flags; a head of random weights is written for this checkpoint."""
        config = NGRAMS
        if self.drafts == "eagle3":
            head = model.with_name(f"{model.name}-eagle3")
            write_head(head, model)
            config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
        return ["--speculative-config", json.dumps(config)] if self.drafts else []

    def command(self, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
        base = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
        # caches that fill for longer than a run lasts seem to leak: xgrammar keeps schemas, up to 512 MiB of them;
        # oneDNN and torch in front of it keep 0.1 MiB for each length of a prompt, up to 1024
        caches = {"VLLM_XGRAMMAR_CACHE_MB": "8", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
        base |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **caches}
        on, python = "cuda" if self.stack == "cuda" else "cpu", Path(sys.executable)
        if self.stack in EMULATED:
            release, card = EMULATED[self.stack]
            stack = stacks.named(release)
            place = find_venv(stack=stack)
            # every card of CANN 9.1 has Triton-Ascend, whose kernels are other code than what stands in for them
            triton = PACKAGES if stack.name == "9.1" and PACKAGES.is_dir() else None
            machine = Machine(stack.cann[0], self.devices, triton=triton, card=card)
            base, python = environment(machine, place, base), place / "bin/python"
        elif self.stack == CPU_0_33:
            base, python = {**base, "CUDA_VISIBLE_DEVICES": ""}, on_cpu.PYTHON
        flags = [*self.flags(), *self.drafter(model)]
        command = serve_here.serve_command(model, NAME, "127.0.0.1", port, flags, on, python)
        variables = serve_here.serving_environment(model, model, base, on)
        del variables[BASE_VARIABLE]  # the plugin has to find the vocabulary
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]  # this tree first, whatever tree the environment knows
        if self.stack == CPU_0_33:
            paths.append(str(on_cpu.ENTRY))
        return command, {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@dataclass
class Served:
    """A server that can be ended and started again at its address.

    variables, flags: more of them. before: the command that runs its command.
    """

    stack: Stack
    model: Path
    log: Path
    before: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Served:
        command, variables = self.stack.command(self.model, self.port)
        self.process: Popen[bytes] = serve_here.start(
            [*self.before, *command, *self.flags], {**variables, **self.variables}, self.log
        )
        try:
            limit = START_LIMIT * (1 if self.stack.stack == "cpu" else 2)
            serve_here.wait_until_ready(self.process, self.url, self.log, timeout=limit)
        except BaseException:
            serve_here.stop(self.process)
            raise
        self.family = family(self.process.pid)
        return self

    def stop(self, with_signal: int = signal.SIGTERM, patience: float = 60) -> list[str]:
        """The processes that outlive the server by 5 s, in words; they are killed."""
        below = {*self.family, *family(self.process.pid)}
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            with contextlib.suppress(TimeoutExpired):
                self.process.wait(patience)
        _, left = psutil.wait_procs(below, 5)
        words = [f"{one.pid} {one.name()}" for one in left if one.is_running()]
        serve_here.stop(self.process, 0)
        return words


def family(root: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(root)
        return [parent, *parent.children(recursive=True)]
    return []


@contextlib.contextmanager
def start(stack: Stack, model: Path, log: Path) -> Iterator[tuple[Server, Popen[bytes]]]:
    """Yields the server when it is ready, and its process; a server that died meanwhile is the caller's finding."""
    served = Served(stack, model, log).start()
    try:
        yield Server(served.url, NAME, log), served.process
    finally:
        serve_here.stop(served.process)


def role(process: psutil.Process, root: int) -> str:
    if process.pid == root:
        return "api"
    return "core" if "EngineCore" in " ".join(process.cmdline()) or "EngineCore" in process.name() else "others"


def gpu_memory() -> float:
    """MiB in use on the first GPU that a server sees, by all processes: within a container none is named."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id", first]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def emulated_memory(pid: int) -> float:
    """MiB of an emulated card that a process has mapped and touched: the card's memory is shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(re.search(r"^RssShmem:\s+(\d+) kB$", status, re.M)[1]) / 1024


def look(root: int, card: str = "") -> dict[str, float]:
    """Memory (MiB), descriptors, threads of the processes by role, without those that end meanwhile.

    card: "gpu" or "emulated" if the server computes on one; its memory is a series of its own.
    """
    found: dict[str, float] = {"memory, gpu": gpu_memory()} if card == "gpu" else {}
    for process in family(root):
        with contextlib.suppress(psutil.Error, OSError):
            who, memory = role(process, root), process.memory_info().rss / 2**20
            costs = {"descriptors, " + who: process.num_fds(), "threads, " + who: process.num_threads()}
            if card == "emulated":
                costs["memory, card"] = emulated_memory(process.pid)
            costs["memory, " + who] = memory - costs.get("memory, card", 0)
            for name, cost in costs.items():
                found[name] = found.get(name, 0) + cost
    return found


@dataclass
class Watch:
    """Looks at the processes and asks /health and /metrics from threads, within `with`.

    root: the server's process now, -1 while there is none. card: see `look`.
    """

    url: str
    root: Callable[[], int]
    card: str = ""
    every: float = ASK_EVERY
    begin: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)  # seconds; infinite where it did not answer 200
    backwards: list[str] = field(default_factory=list)  # counters that went back
    _counters: dict[str, float] = field(default_factory=dict)
    _of: int = -1
    _end: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._threads = [
            threading.Thread(target=self._each, args=work, daemon=True)
            for work in ((LOOK_EVERY, self._look), (self.every, self._ask))
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)

    def _each(self, seconds: float, work: Callable[[int], None]) -> None:
        while not self._end.wait(seconds):
            root = self.root()
            if root > 0:
                work(root)

    def _look(self, root: int) -> None:
        found = look(root, self.card)
        if found and self.root() == root:
            self.samples.append((time.monotonic() - self.begin, found))

    def _ask(self, root: int) -> None:
        begin = time.monotonic()
        try:
            with serve_here.DIRECT.open(f"{self.url}/health", timeout=30) as response:
                took = time.monotonic() - begin if response.status == 200 else float("inf")
            counters = counters_of(self.url)
        except OSError:
            took, counters = float("inf"), {}
        if self.root() != root:
            return  # it ended meanwhile, by intent
        self.health.append(took)
        before = self._counters if self._of == root else {}
        both = counters.keys() & before.keys()
        self.backwards += [
            f"{name}: {before[name]:g} → {counters[name]:g}" for name in both if counters[name] < before[name]
        ]
        if counters:
            self._counters, self._of = counters, root


def counters_of(url: str) -> dict[str, float]:
    """The series of /metrics that may only grow."""
    with serve_here.DIRECT.open(f"{url}/metrics", timeout=30) as response:
        return {name: float(value) for name, value in COUNTER.findall(response.read().decode())}


def key_value_use(server: Server) -> dict[str, float]:
    """The metrics that are zero on a server at rest."""
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    return {name: server.metric(f"vllm:{name}") for name in names}
