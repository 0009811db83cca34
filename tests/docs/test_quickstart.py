"""The two commands of README and quickstart: `make serve` as the Makefile has it, and the request, in a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.shell import commands
from tests.markdown import ROOT, code_blocks
from tests.serving.server import START_LIMIT, free_port

pytestmark = [pytest.mark.serving, pytest.mark.slow]
PAGES = ("README.md", "docs/quickstart.md")


def recipe(port: int) -> list[str]:
    """What `make serve PORT=…` runs after its set-up."""
    dry = ["make", "-n", "serve", f"PORT={port}"]
    lines = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    return shlex.split(next(line for line in lines.splitlines() if line.startswith("exec ")))[1:]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that was started as the pages say; Ctrl-C stops it at the end."""
    pytest.importorskip("vllm")
    port, out = free_port(), tmp_path_factory.mktemp("make_serve") / "out.txt"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "TIKTOKEN_ENCODINGS_BASE"}
    with out.open("w") as file:
        process = subprocess.Popen(recipe(port), cwd=ROOT, env=kept, stdout=file, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + START_LIMIT
        while "Ctrl-C stops" not in out.read_text():
            assert process.poll() is None, out.read_text()[-6000:]
            assert time.monotonic() < deadline, out.read_text()[-6000:]
            time.sleep(0.5)
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, out.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # its handler stops the server's process group
            process.wait(60)


@pytest.mark.parametrize("page", PAGES)
def test_make_serve_answers_the_pages_request(page: str, port: int) -> None:
    path = Path(ROOT / page)
    shown = [command.text for command in commands(path.read_text(encoding="utf-8"), page)]
    assert shown[0] == "make serve"
    request = shown[1].replace("http://127.0.0.1:8000/", f"http://127.0.0.1:{port}/")
    assert request != shown[1]
    done = subprocess.run(["bash", "-c", request], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (choice,) = json.loads(done.stdout)["choices"]
    promised = json.loads(code_blocks(path, "json")[0])
    assert choice["finish_reason"] == promised["finish_reason"]
    assert {key: choice["message"][key] for key in promised["message"]} == promised["message"]
    assert re.fullmatch(r"3 \+ 4 = 7\.", promised["message"]["content"])
