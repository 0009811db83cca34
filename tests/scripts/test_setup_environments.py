"""Set-up by uv: what makes it install again, what it never installs, and the sentence that each fault ends in."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from scripts.setup import environments
from scripts.setup.environments import CAUSES, ENVIRONMENTS, UV, SetupError, alone_in, find_python, from_pip
from tests.scripts.shell import ROOT, make, write_program

COPIED = ("scripts/setup/environments.py", "pyproject.toml", "emulator/pyproject.toml", "requirements/uv.txt")


class Checkout:
    """A checkout whose environment `docs` is of one package, `mkdocs`, that pip is configured to find in a folder."""

    def __init__(self, folder: Path) -> None:
        for name in COPIED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / ".venv-uv").symlink_to(ROOT / ".venv-uv")
        self.folder, self.venv, self.lock = folder, folder / ".venv-docs", folder / "requirements/docs.txt"
        self.index = folder.with_name("index")  # pip knows no folder with a blank
        self.index.mkdir()
        (folder / "requirements/docs.in").write_text("mkdocs\n")
        self.publish("1.0")

    def publish(self, version: str) -> None:
        """Writes the wheel, and the lock with its hash."""
        info, wheel = f"mkdocs-{version}.dist-info", self.index / f"mkdocs-{version}-py3-none-any.whl"
        files = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: mkdocs\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        digest = {
            name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for name, text in files.items()
        }
        record = [f"{name},sha256={value.rstrip(b'=').decode()}," for name, value in digest.items()]
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"])}.items():
                archive.writestr(name, text)
        self.write_lock(version, hashlib.sha256(wheel.read_bytes()).hexdigest())

    def write_lock(self, version: str, digest: str) -> None:
        self.lock.write_text(f"mkdocs=={version} --hash=sha256:{digest}\n")

    def set_up(self, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        cache = {"UV_CACHE_DIR": str(self.folder / "cache")}
        command = [sys.executable, str(self.folder / COPIED[0]), "docs", "--python", sys.executable]
        return subprocess.run(command, env=kept | pip | cache | variables, capture_output=True, text=True, timeout=120)

    def installed(self) -> set[str]:
        return {path.name for path in self.venv.glob("lib/python*/site-packages/mkdocs-*.dist-info")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if not UV.exists():
        pytest.skip("uv is not here: make setup")
    return Checkout(tmp_path / "a checkout")


def test_an_environment_is_synced_after_each_change_and_else_not_touched(checkout: Checkout) -> None:
    done = checkout.set_up()
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.installed() == {"mkdocs-1.0.dist-info"}
    nowhere = {"PIP_FIND_LINKS": "/nowhere", "UV_CACHE_DIR": str(checkout.folder / "empty")}
    assert checkout.set_up(**nowhere).stdout == "set-up: .venv-docs is up to date\n", "it has to work without a network"
    shutil.rmtree(next(checkout.venv.glob("lib/python*/site-packages/mkdocs-1.0.dist-info")))
    assert "complete" in checkout.set_up().stdout, "a removed package is noticed"
    checkout.publish("2.0")
    assert "complete" in checkout.set_up().stdout
    assert checkout.installed() == {"mkdocs-2.0.dist-info"}
    (checkout.venv / "bin/python").unlink()
    assert "complete" in checkout.set_up().stdout, "a broken environment is made anew"
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.venv = checkout.folder / ".venv-docs"
    assert "complete" in checkout.set_up().stdout, "the commands of a moved one start the old path"
    assert str(checkout.venv) in (checkout.venv / "bin/activate").read_text()


def test_an_interrupted_set_up_is_taken_up_again(checkout: Checkout) -> None:
    state = checkout.venv / ".npu-gptoss"
    state.mkdir(parents=True)  # ended before the environment was made
    assert "complete" in checkout.set_up().stdout
    (state / "done").unlink()  # ended before its last step
    assert "complete" in checkout.set_up().stdout


def test_a_file_with_another_hash_is_never_installed(checkout: Checkout) -> None:
    checkout.write_lock("1.0", "0" * 64)
    done = checkout.set_up()
    assert done.returncode == 1
    assert "mkdocs" in done.stderr
    assert "has another hash than the lock says and is not installed" in done.stderr
    assert checkout.installed() == set()


def test_missing_version_is_named_and_unlocked_takes_another(checkout: Checkout) -> None:
    checkout.write_lock("9.9", "0" * 64)
    done = checkout.set_up()
    assert done.returncode == 1
    assert "index has no mkdocs==9.9" in done.stderr
    assert checkout.set_up(UNLOCKED="1").returncode == 0
    assert checkout.installed() == {"mkdocs-1.0.dist-info"}


def test_a_folder_that_it_did_not_make_is_not_touched(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "mine").touch()
    assert "was not made by this set-up" in checkout.set_up().stderr
    assert (checkout.venv / "mine").exists()


def test_a_second_set_up_waits_for_the_first(checkout: Checkout) -> None:
    hold = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    lock = checkout.folder / ".venv-docs.lock"
    lock.touch()
    first = subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, str(checkout.folder / COPIED[0]), "docs"], timeout=1, capture_output=True)
    first.communicate()
    assert checkout.set_up().returncode == 0


def test_ctrl_c_ends_in_a_sentence(checkout: Checkout) -> None:
    write_program(checkout.folder / "uv", "sleep 60")
    script = checkout.folder / COPIED[0]
    script.write_text(script.read_text().replace('".venv-uv/bin/uv"', '"uv"').replace("    bring_uv()", "    pass"))
    (checkout.venv / ".npu-gptoss").mkdir(parents=True)
    command = [sys.executable, str(script), "docs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert "interrupted. Run the same command again" in process.communicate(timeout=30)[1]
    assert process.returncode == 130


def test_uv_looks_where_pip_looks_and_first_in_the_fullest_index() -> None:
    """A version that two indexes have was taken from an additional one, which had no wheel for this machine of it."""
    said = "global.extra-index-url='file:///a\\nfile:///b'\nglobal.find-links='/x'\n:env:.find-links='/y /z'\n"
    variables = from_pip(said, "https://usual/simple")
    assert variables["UV_INDEX"].split() == ["https://usual/simple", "file:///a", "file:///b"]
    assert variables["UV_FIND_LINKS"] == "/y,/z"
    assert from_pip("global.index-url='https://mine/'\n", "https://usual")["UV_DEFAULT_INDEX"] == "https://mine/"
    assert "UV_INDEX" not in from_pip("", "https://usual")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("failed to copy /a to /b: No space left on device (os error 28)", "the disk is full"),
        ("error: Failed to fetch: `https://an.index/simple/x/`\n cause: dns error", "index cannot be reached"),
        ("Because there is no version of numpy==2.2.999 and you require", "index has no numpy==2.2.999."),
        ("Because torch-npu was not found in the package registry", "index has no torch-npu."),
    ],
)
def test_a_fault_of_uv_becomes_a_sentence(said: str, cause: str, tmp_path: Path) -> None:
    program = write_program(tmp_path / "program", f"cat <<'E'\n{said}\nE\nexit 1")
    with pytest.raises(SetupError, match=cause):
        environments.run(tmp_path, program)
    assert len(CAUSES) == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_refusal_of_the_file_system_becomes_a_sentence(number, tmp_path, capsys) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / ".venv"))

    before = [(which, signal.getsignal(which)) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert alone_in(tmp_path / ".venv", fail) == 1
    for which, handler in before:
        signal.signal(which, handler)
    assert ("disk is full" if number == errno.ENOSPC else "git clone") in capsys.readouterr().err


@pytest.mark.parametrize("program", ["echo 3.7", "exit 1", None])
def test_a_python_that_does_not_fit_is_named(program: str | None, tmp_path: Path) -> None:
    path = tmp_path / "python3.11"
    if program:
        write_program(path, program)
    with pytest.raises(SetupError, match=rf"Python 3\.11 is needed.*{path} is none.*PYTHON=path"):
        find_python(str(path), ("3.11", "3.12"))


def test_a_missing_compiler_is_named_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SetupError, match=r"no-such-compiler.*apt install g\+\+"):
        ENVIRONMENTS["emulated"].check(sys.executable)
    monkeypatch.setenv("CC", sys.executable)
    python = write_program(tmp_path / "python", "echo /nowhere/python3.12/Python.h")
    with pytest.raises(SetupError, match=r"/nowhere/python3\.12/Python\.h.*apt install python3\.12-dev"):
        ENVIRONMENTS["cuda"].check(str(python))


def test_a_python_for_the_rest_leaves_an_emulated_910b_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def choose(wanted: str, pythons: tuple[str, ...]) -> str:
        asked.append(wanted)
        raise SetupError("enough")

    monkeypatch.setattr(environments, "version_of", lambda python: "3.12")
    monkeypatch.setattr(environments, "bring_uv", lambda: None)
    monkeypatch.setattr(environments, "find_python", choose)
    for name in ("emulated", "cpu", "cuda"):
        with pytest.raises(SetupError):
            environments.set_up(ENVIRONMENTS[name], tmp_path / "venv", False, "python3.12")
    assert asked == ["", "python3.12", "python3.12"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "ON=cpu", "PORT=abc"), "PORT=abc is no port"),
        (("serve-emulated", "STACK=7"), "make serve-emulated: STACK=7 is not known"),  # before 3 GB are set up
    ],
)
def test_a_port_or_stack_that_is_none_is_a_sentence(words: tuple[str, ...], told: str) -> None:
    done = make(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stdout == ""
