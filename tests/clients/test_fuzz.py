"""schemathesis over every operation of the server's own /openapi.json, while an honest request repeats.

Bounded in count and time, on 127.0.0.1. The server has a short context: most requests of the fuzz are refused, but a
valid one would be generated to the end of the context.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.clients.places import TODAY, venv
from tests.serving.server import Server, serve

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CASES = int(os.environ.get("FUZZ_CASES", "60"))  # of each operation
SEED = int(os.environ.get("FUZZ_SEED", "13"))
LIMIT = 540  # seconds for all
ANSWER_LIMIT = 30.0  # seconds for the honest request beside them
# An honest reply takes less; a refusal, far less. A generated request that is valid ends with its context.
REPLY_LIMIT = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder: Path = tmp_path_factory.mktemp("fuzz")
    write_tiny(folder / "model", trained=True, mxfp4=True)
    with serve(folder / "model", folder / "server.log", "--max-model-len", "256", "--max-num-seqs", "32") as running:
        yield running


class Beside:
    """An honest request, again and again, until `close`; `wrong` has the other answers."""

    def __init__(self, server: Server) -> None:
        question = {"role": "user", "content": "What is 3 + 4?"}
        self.body = {"model": server.name, "temperature": 0, "messages": [question]}
        self.url = f"{server.url}/v1/chat/completions"
        self.answers, self.wrong, self.slowest = 0, [], 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._end.is_set():
            begin = time.monotonic()
            try:
                reply = requests.post(self.url, json=self.body, timeout=ANSWER_LIMIT)
                content = reply.json()["choices"][0]["message"]["content"] if reply.ok else reply.text
                if content != "3 + 4 = 7.":
                    self.wrong.append(content)
            except (OSError, ValueError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            self.answers += 1
            self.slowest = max(self.slowest, time.monotonic() - begin)
            self._end.wait(0.5)

    def close(self) -> None:
        self._end.set()
        self._thread.join(ANSWER_LIMIT + 5)


@pytest.mark.parametrize("phase", ["fuzzing", "coverage"])
def test_no_generated_request_is_answered_with_500_or_hurts_another(phase: str, server: Server, tmp_path: Path) -> None:
    """Coverage goes through the bounds of every field; it is many more, so it ends with its time, not with its list."""
    program = venv(TODAY) / "bin/schemathesis"
    if not program.exists():
        pytest.fail(f"{venv('2026').name} is not set up; run: make test-clients")
    report = tmp_path / "fuzz.xml"
    command = [str(program), "run", f"{server.url}/openapi.json", "--url", server.url]
    command += ["--checks", "not_a_server_error", "--max-examples", str(CASES), "--seed", str(SEED), "--no-shrink"]
    command += ["--request-timeout", str(REPLY_LIMIT), "--phases", phase, "--no-color"]
    command += ["--suppress-health-check", "all", "--continue-on-failure", "--warnings", "off", "--max-time", "300"]
    command += ["--report", "junit", "--report-junit-path", str(report)]
    beside = Beside(server)
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    finally:
        beside.close()
    (tmp_path / "fuzz.txt").write_text(done.stdout + done.stderr)
    assert server.is_alive()
    assert beside.wrong == [], f"of {beside.answers} honest requests beside the fuzz"
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert "/v1/responses" in report.read_text(), "the fuzz never came to an operation that matters"
