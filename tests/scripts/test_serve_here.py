"""`make serve` says why it cannot serve, and leaves no process behind. The real server is in tests/serving."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from npu_gptoss.errors import InputError
from scripts import serve_here
from scripts.serve_here import ServeError
from scripts.setup.environments import held
from tests.serving.in_flight import is_running
from tests.serving.server import free_port, wait_for

SLEEPS = "import time; time.sleep(60)"


def test_folder_of_the_hubs_cache_is_not_named_by_its_hash(tmp_path: Path) -> None:
    cached = tmp_path / "models--openai--gpt-oss-20b/snapshots/6cee5e8"
    assert (serve_here.served_name(cached), serve_here.served_name(tmp_path / "mine")) == ("gpt-oss-20b", "mine")


@contextlib.contextmanager
def started(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in for the server: this Python with these arguments."""
    process = serve_here.start([sys.executable, *words], os.environ, log)
    try:
        yield process
    finally:
        serve_here.stop(process, patience=0.1)


def read_when_written(log: Path) -> str:
    while not log.read_text():
        time.sleep(0.05)
    return log.read_text()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", None, "make serve PORT="),
        ("127.0.0.1", 99999, "PORT=99999"),
        ("127.0.0.1", 0, "PORT=0"),
        ("127.0.0.1", "abc", "PORT=abc"),
        ("no.such.host.invalid", 8000, "HOST"),
    ],
)
def test_an_address_that_cannot_be_is_refused(host, port, words, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1] if port is None else port
        assert serve_here.main(["--host", host, "--port", str(number)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "MODEL="),
        ((), r"config\.json"),
        (("config.json",), "model_type"),
        (("config.json", "model.safetensors"), r"config\.json: model_type"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_before_vllm_starts(tmp_path, files, words) -> None:
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
        for name in files:
            (model / name).write_text("{}")
    with pytest.raises(InputError, match=words):
        serve_here.own_checkpoint(str(model))


def test_two_servers_started_together_write_the_tiny_checkpoint_once(tmp_path, monkeypatch) -> None:
    """The second writer would remove the files that the first server loads."""
    written: list[str] = []

    def slowly(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-2])
        folder.mkdir()
        time.sleep(0.3)
        (folder / "model.safetensors").touch()
        written.append(str(folder))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(serve_here.subprocess, "run", slowly)
    place = tmp_path / "checkpoints/gpt-oss-tiny"
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve_here.tiny_checkpoint, [place, place])) == [place, place]
    assert written == [str(place)]


def test_a_file_system_without_locks_ends_no_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    with held(tmp_path):
        assert serve_here.tiny_checkpoint(tmp_path / "gpt-oss-tiny").is_dir()


def test_in_a_container_the_hint_is_not_to_leave_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("container", "docker")
    assert "publish the port on 127.0.0.1" in serve_here.exposure("0.0.0.0", [], "")[-1]


@pytest.mark.parametrize(
    ("flags", "url", "name"),
    [
        ("--port {} --served-model-name me you", "http://127.0.0.1:{}", "me"),
        ("--port=1 --port={} --host ::1", "http://[::1]:{}", "gpt-oss-tiny"),
        ("--port {} --ssl-certfile c --ssl_keyfile k", "https://127.0.0.1:{}", "gpt-oss-tiny"),
    ],
)
def test_make_waits_elsewhere_than_its_flags_say(tmp_path, monkeypatch, capsys, flags, url, name) -> None:
    port, asked, log = free_port(), [], tmp_path / "log"
    log.touch()
    monkeypatch.setattr(serve_here, "tiny_checkpoint", lambda: Path("tiny"))
    monkeypatch.setattr(serve_here, "ensure_vocabulary", lambda model: Path("vocabulary"))
    monkeypatch.setattr(serve_here, "start", lambda *_: subprocess.Popen(["true"]))
    monkeypatch.setattr(serve_here, "wait_until_ready", lambda _, url, *__, **___: asked.append(url) or 1.0)
    assert serve_here.main([f"--flags={flags.format(port)}", f"--log={log}"]) == 2  # as it ended
    assert asked == [url.format(port)]
    assert f"{url.format(port)}/v1/chat/completions" in (said := capsys.readouterr().out)
    assert f'"model": "{name}"' in said


def test_make_waits_for_ever_for_a_server_on_a_socket(capsys: Any) -> None:
    assert serve_here.main(["--flags", "--uds /tmp/x"]) == 2
    assert "--uds" in capsys.readouterr().err


def test_a_ctrl_c_before_the_server_starts_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_here, "tiny_checkpoint", Mock(side_effect=KeyboardInterrupt))
    assert serve_here.main(["--port", str(free_port())]) == 130


def test_the_users_variables_win(tmp_path: Path) -> None:
    environment = serve_here.serving_environment(tmp_path, tmp_path, {"OMP_NUM_THREADS": "7"})
    assert (environment["OMP_NUM_THREADS"], environment["HF_HUB_OFFLINE"]) == ("7", "1")
    assert environment["NPU_GPTOSS_PLATFORM"] == "cpu", "an accelerator would keep the plugin from the CPU"
    command = serve_here.serve_command(tmp_path, "name", "127.0.0.1", 8000, ["--max-model-len", "99"])
    assert command[-2:] == ["--max-model-len", "99"], "argparse takes the last one"


def test_a_vllm_without_a_script_is_started_by_its_module(tmp_path: Path) -> None:
    """As with `pip install --user`, `--target`, or an image with vLLM on PYTHONPATH."""
    python = tmp_path / "python"

    def begin() -> list[str]:
        command = serve_here.serve_command(tmp_path, "name", "127.0.0.1", 8000, [], python=python)
        return command[: command.index("serve")]

    assert begin() == [str(python), "-m", "vllm.entrypoints.cli.main"]
    (tmp_path / "vllm").touch()
    assert begin() == [str(tmp_path / "vllm")]


def test_on_a_gpu_nothing_of_the_cpu_is_passed(tmp_path: Path) -> None:
    """NPU_GPTOSS_PLATFORM=cpu would choose the CPU's kernels; the length would cut a real checkpoint's."""
    environment = serve_here.serving_environment(tmp_path, tmp_path, {"HF_HUB_OFFLINE": "0"}, "cuda")
    assert set(environment) == {
        *("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "TIKTOKEN_ENCODINGS_BASE", "VLLM_USE_FLASHINFER_SAMPLER")
    }
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert "--max-model-len" not in serve_here.serve_command(tmp_path, "name", "127.0.0.1", 8000, [], "cuda")


def test_our_kernels_are_reported_in_one_line_on_any_ranks(tmp_path: Path) -> None:
    said = "npu-gptoss computes all of gpt-oss by its own kernels, experts in mxfp4; NPU_GPTOSS=0 leaves it to vLLM."
    log = tmp_path / "log"
    log.write_text("".join(f"(Worker_TP{rank} pid=1) INFO 11-24 [model.py:95] {said}\n" for rank in range(2)))
    assert serve_here.ours(log) == [said]
    model = (serve_here.ROOT / "npu_gptoss/serving/cuda/model.py").read_text()
    assert serve_here.OURS.search(model), "the model says it in other words"


@pytest.mark.parametrize(
    ("code", "timeout", "words"),
    [
        ("print('first'); raise SystemExit('no memory')", 20, r"exit code 1 before(.|\n)*\n    no memory"),
        (SLEEPS, 1, "not ready after 1 s"),
    ],
)
def test_a_server_that_dies_or_never_answers_is_given_up(tmp_path: Path, code: str, timeout: int, words: str) -> None:
    log = tmp_path / "log"
    with started(log, "-c", code) as process, pytest.raises(ServeError, match=words):
        serve_here.wait_until_ready(process, "http://127.0.0.1:9", log, timeout=timeout)


COLOURED = "\x1b[1;36m(APIServer pid=1)\x1b[0;0m"
NOISE = f"""INFO npu-gptoss loads
{COLOURED} WARNING 11-21 this can cause errors like `OSError: [Errno 24] Too many`
{COLOURED} ValueError: first
RuntimeError: see above
"""
DIED = "npu-gptoss: the engine died: RuntimeError: first. The server ends"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (NOISE, "first"),
        (NOISE + "  Value error, npu-gptoss cannot serve this: float16.", "npu-gptoss cannot serve this: float16."),
        (NOISE + "ERROR [core.py:708] npu_gptoss.model.x.CheckpointError: m: the file is truncated", "m: the file is"),
        (f"ValueError: a consequence\n(APIServer pid=1) ERROR {DIED}\n(APIServer pid=1) bye\n", "the engine died: "),
        ("OSError: x\n(APIServer pid=1) vllm serve: cannot listen\n", "cannot listen"),
        ("all is well", ""),
    ],
)
def test_the_reason_is_not_lost_among_tracebacks(tmp_path: Path, log: str, reason: str) -> None:
    (tmp_path / "log").write_text(log)
    found = serve_here.likely_reason(tmp_path / "log")
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_second_server_does_not_cut_the_first_ones_log(tmp_path: Path) -> None:
    assert serve_here.log_of(8000) != serve_here.log_of(8001)
    log = tmp_path / "log"
    with started(log, "-c", f"print('mine', flush=True); {SLEEPS}"):
        assert read_when_written(log) == "mine\n"
        with pytest.raises(ServeError, match=str(log)):
            serve_here.start([sys.executable, "-c", ""], os.environ, log)
        assert log.read_text() == "mine\n"
    with started(log, "-c", "") as second:
        assert second.wait(20) == 0
    assert log.read_text() == "", "the log of a server that is gone makes room"


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="--log"):
        serve_here.start([sys.executable, "-c", ""], os.environ, tmp_path / "no folder" / "log")


def test_a_second_ctrl_c_leaves_no_server_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = serve_here.start([sys.executable, "-c", SLEEPS], os.environ, tmp_path / "log")
    monkeypatch.setattr(process, "send_signal", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        serve_here.stop(process)
    assert process.returncode == -signal.SIGKILL


def test_the_proxy_is_not_asked_for_a_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would say no for ever, and `make serve` wait for ever."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers what the environment was
    (tmp_path / "health").touch()
    port, log = str(free_port()), tmp_path / "log"
    with started(log, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", str(tmp_path)) as process:
        assert serve_here.wait_until_ready(process, f"http://127.0.0.1:{port}", log, timeout=10) < 10


STUBBORN = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "{SLEEPS}"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_stopping_leaves_no_child_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(log, "-c", STUBBORN) as process:
        child = int(read_when_written(log))
        assert is_running(child)
        serve_here.stop(process, patience=0.5)
    assert process.returncode == -signal.SIGKILL
    assert wait_for(lambda: not is_running(child), 5)


def test_a_server_started_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    """A shell without job control has its background commands ignore SIGINT, and their own commands inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with started(tmp_path / "log", "-c", SLEEPS) as process:
            serve_here.stop(process, patience=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == -signal.SIGTERM


def test_the_printed_request_survives_the_shell() -> None:
    words = shlex.split(serve_here.example_request("http://h:1", "it's", 'say "hi"'))
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["messages"][0]["content"]) == ("it's", 'say "hi"')
