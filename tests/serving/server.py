"""A real `vllm serve` for tests: started as `make serve` starts it, and gone with everything it started afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from npu_gptoss.serving.compat.server.ports import quiet_port
from scripts import serve_here

START_LIMIT = 600  # seconds; about 20 on two idle cores, and other tests may have them too


@dataclass(frozen=True)
class Server:
    """`url` without a path; `name` is the served model's; `log` holds the server's output."""

    url: str
    name: str
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of a Prometheus metric that carry these labels."""
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        total = 0.0
        for series, value in re.findall(rf"^{re.escape(name)}(?:\{{(.*?)\}})? (\S+)$", text, re.M):
            if all(f'{key}="{wanted}"' in series for key, wanted in labels.items()):
                total += float(value)
        return total

    def is_alive(self) -> bool:
        return requests.get(f"{self.url}/health", timeout=30).ok


def free_port() -> int:
    """A port that no process uses, also some seconds later."""
    port = quiet_port()
    if port is not None:
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    *flags: str,
    name: str = "gpt-oss-tiny",
    on: str = "cpu",
    through: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Yields the server when it is ready. Without the vocabulary in the environment: the plugin has to find it.

    on: of serve_here.PLACES. through: a command in the place of `vllm`. variables: of its environment.
    """
    port = free_port()
    base = {key: value for key, value in os.environ.items() if key != BASE_VARIABLE and not key.startswith("VLLM_")}
    environment = serve_here.serving_environment(
        model, model, {**base, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **(variables or {})}, on
    )
    del environment[BASE_VARIABLE]
    command = serve_here.serve_command(model, name, "127.0.0.1", port, flags, on)
    if through:
        command = [*through, *command[command.index("serve") :]]
    process = serve_here.start(command, environment, log)
    try:
        url = f"http://127.0.0.1:{port}"
        serve_here.wait_until_ready(process, url, log, timeout=START_LIMIT * (2 if on == "cuda" else 1))
        yield Server(url, name, log)
        assert process.poll() is None, f"the server died during the tests; its log is {log}"
    finally:
        serve_here.stop(process)
