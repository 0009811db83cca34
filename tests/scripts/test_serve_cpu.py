"""What `make serve` says when it cannot serve, and that nothing survives it. The real server is in tests/serving."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from npu_gptoss.errors import InputError
from npu_gptoss.serving import platform
from scripts import serve_cpu
from scripts.serve_cpu import ServeError
from tests.serving.server import free_port


def test_a_taken_port_gives_a_sentence_and_a_way_out(capsys: pytest.CaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve_cpu.main(["--port", str(port)]) == 2
    assert f"make serve PORT={port + 1}" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 99999), ("127.0.0.1", 0), ("no.such.host.invalid", 8000)])
def test_an_address_that_cannot_be_gives_a_sentence(host: str, port: int, capsys: pytest.CaptureFixture) -> None:
    assert serve_cpu.main(["--host", host, "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith("\nmake serve: ")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "is not a directory"),
        ((), r"no config\.json"),
        (("config.json",), "model_type"),
        (("config.json", "model.safetensors"), r"config\.json: model_type"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_before_vllm_starts(
    tmp_path: Path, files: tuple[str, ...] | None, words: str
) -> None:
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
        for name in files:
            (model / name).write_text("{}")
    with pytest.raises(InputError, match=words):
        serve_cpu.own_checkpoint(str(model))


def test_two_servers_started_together_write_the_tiny_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would remove what the first one's server is loading."""
    written: list[str] = []

    def slowly(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-2])
        assert not folder.exists()
        folder.mkdir()
        time.sleep(0.3)
        (folder / "model.safetensors").touch()
        written.append(str(folder))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(serve_cpu.subprocess, "run", slowly)
    place = tmp_path / "checkpoints/gpt-oss-tiny"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(serve_cpu.tiny_checkpoint, [place, place]))
    assert both == [place, place]
    assert written == [str(place)]
    assert (place / "model.safetensors").exists()


def test_a_ctrl_c_before_the_server_starts_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_cpu, "tiny_checkpoint", interrupted)
    assert serve_cpu.main(["--port", str(free_port())]) == 130
    assert "make serve: interrupted" in capsys.readouterr().err


def test_what_the_user_sets_wins(tmp_path: Path) -> None:
    environment = serve_cpu.cpu_environment(tmp_path, tmp_path, {"OMP_NUM_THREADS": "7"})
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["HF_HUB_OFFLINE"] == "1"
    command = serve_cpu.serve_command(tmp_path, "name", "127.0.0.1", 8000, ["--max-model-len", "99"])
    assert command[-2:] == ["--max-model-len", "99"], "argparse takes the last one"


def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = serve_cpu.start([sys.executable, "-c", "print('first'); raise SystemExit('no memory')"], os.environ, log)
    with pytest.raises(ServeError, match=r"exit code 1 before it was ready(.|\n)*no memory"):
        serve_cpu.wait_until_ready(process, "http://127.0.0.1:9", log, timeout=20)


def test_the_reason_is_not_lost_among_tracebacks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    warning = (
        "\x1b[1;36m(APIServer pid=1)\x1b[0;0m WARNING 11-21 this can cause errors like `OSError: [Errno 24] Too many`"
    )
    errors = [
        "INFO npu-gptoss loads",
        warning,
        "\x1b[1;36m(Core)\x1b[0;0m ValueError: first",
        "RuntimeError: see above",
    ]
    log.write_text("\n".join(errors))
    assert serve_cpu.likely_reason(log) == "first"
    log.write_text("\n".join([*errors, "  Value error, npu-gptoss cannot serve this: float16."]))
    assert serve_cpu.likely_reason(log) == "npu-gptoss cannot serve this: float16."
    own = "ERROR 11-21 [core.py:708] npu_gptoss.model.checkpoint_files.CheckpointError: m: the file is truncated"
    log.write_text("\n".join([*errors, own]))
    assert serve_cpu.likely_reason(log) == "m: the file is truncated"
    log.write_text("all is well")
    assert serve_cpu.likely_reason(log) == ""


def test_the_servers_last_word_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = "ERROR 11-22 [shutdown.py:1] npu-gptoss: the engine died: RuntimeError: first. The server ends"
    log.write_text(f"(EngineCore pid=2) ValueError: a consequence\n(APIServer pid=1) {ended}\n(APIServer pid=1) bye\n")
    assert serve_cpu.likely_reason(log) == "the engine died: RuntimeError: first. The server ends"
    log.write_text("OSError: x\n(APIServer pid=1) vllm serve: the server cannot listen on a port\n")
    assert serve_cpu.likely_reason(log) == "the server cannot listen on a port"


def test_a_second_server_does_not_cut_the_first_ones_log(tmp_path: Path) -> None:
    assert serve_cpu.log_of(8000) != serve_cpu.log_of(8001)
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('mine', flush=True); import time; time.sleep(60)"]
    first = serve_cpu.start(command, os.environ, log)
    try:
        while not log.read_text():
            time.sleep(0.05)
        with pytest.raises(ServeError, match="another server writes"):
            serve_cpu.start(command, os.environ, log)
        assert log.read_text() == "mine\n"
    finally:
        serve_cpu.stop(first, patience=0.1)
    second = serve_cpu.start([sys.executable, "-c", ""], os.environ, log)
    assert second.wait(20) == 0
    assert log.read_text() == "", "the log of a server that is gone makes room"


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"cannot be written: .*--log"):
        serve_cpu.start([sys.executable, "-c", ""], os.environ, tmp_path / "no folder" / "log")


def test_a_second_ctrl_c_leaves_no_server_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = serve_cpu.start([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path / "log")

    def interrupted(signum: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "send_signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve_cpu.stop(process)
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = serve_cpu.start([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, log)
    try:
        with pytest.raises(ServeError, match="not ready after 1 s"):
            serve_cpu.wait_until_ready(process, "http://127.0.0.1:9", log, timeout=1)
    finally:
        serve_cpu.stop(process)


def test_the_proxy_is_not_asked_for_a_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say no for ever, and `make serve` wait for ever."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers what the environment was
    (tmp_path / "health").touch()
    port, log = free_port(), tmp_path / "log"
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    process = serve_cpu.start(words, os.environ, log)
    try:
        assert serve_cpu.wait_until_ready(process, f"http://127.0.0.1:{port}", log, timeout=10) < 10
    finally:
        serve_cpu.stop(process, patience=1)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stopping_leaves_no_child_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = serve_cpu.start([sys.executable, "-c", STUBBORN], os.environ, log)
    while not log.read_text().strip():
        time.sleep(0.05)
    child = int(log.read_text())
    assert _is_running(child)
    serve_cpu.stop(process, patience=0.5)
    serve_cpu.stop(process)
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def test_the_printed_request_survives_the_shell() -> None:
    words = shlex.split(serve_cpu.example_request("http://h:1", "it's", 'say "hi"'))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"][0]["content"] == 'say "hi"'


@pytest.mark.serving
def test_an_accelerator_does_not_keep_make_serve_from_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.delenv("NPU_GPTOSS_PLATFORM", raising=False)
    here = platform.objections(tmp_path)
    assert "an accelerator is present: /dev/nvidia0" in here
    monkeypatch.setenv("NPU_GPTOSS_PLATFORM", serve_cpu.cpu_environment(tmp_path, tmp_path, {})["NPU_GPTOSS_PLATFORM"])
    assert not any("accelerator" in reason for reason in platform.objections(tmp_path))
