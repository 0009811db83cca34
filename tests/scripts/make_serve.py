"""`make serve` and `make serve-emulated` as a user has them: the recipe's command, the line that says ready, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.scripts.shell import ROOT, make
from tests.serving.server import START_LIMIT, free_port


def recipe(target: str) -> str:
    """The commands of `make TARGET` after its set-up, for a shell; the environment has the user's options."""
    dry = make("-n", target)
    assert dry.returncode == 0, dry.stderr
    return next(line for line in dry.stdout.replace("\\\n", " ").splitlines() if "exec " in line)


def _hears_ctrl_c() -> None:
    """A background job of a script (`make test &`), and all its children, would ignore Ctrl-C otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def made(target: str, out: Path, limit: float = START_LIMIT, **variables: str) -> Iterator[int]:
    """The port of a server that is ready; its output goes to `out`. Ctrl-C has to end it without an error."""
    port = free_port()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "TIKTOKEN_ENCODINGS_BASE"}
    with out.open("w") as file:
        given = {
            "MODEL": "",
            "ARGS": "",
            "STACK": "8.3",
            "EMULATE": "",
            "HOST": "127.0.0.1",
            "PORT": str(port),
            **variables,
        }
        process = subprocess.Popen(
            ["sh", "-c", recipe(target)],
            cwd=ROOT,
            env=kept | given,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_hears_ctrl_c,
        )
    try:
        deadline = time.monotonic() + limit
        while "Ctrl-C stops" not in out.read_text():
            assert process.poll() is None, out.read_text()[-6000:]
            assert time.monotonic() < deadline, out.read_text()[-6000:]
            time.sleep(0.5)
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, out.read_text()[-3000:]
        assert "stopping" in out.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # its handler stops the server's process group
            process.wait(60)
