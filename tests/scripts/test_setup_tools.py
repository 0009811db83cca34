"""What the set-ups of environments beside `.venv` have in common: whose folders they touch, and what they install."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.scripts.shell import SCRIPTS
from tests.serving.server import free_port

sys.path.insert(0, str(SCRIPTS / "setup"))
import setup_docs
from setup_venv import Environment, Runner, SetupError, is_done

NAME, VERSION = "mkdocs", "1.6.1"
WHEEL = f"{NAME}-{VERSION}-py3-none-any.whl"


def run(script: str, venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "setup" / script), "--venv", str(venv)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", ["setup_docs.py", "setup_evalscope.py", "setup_emulated.py", "setup_clients.py"])
def test_a_folder_that_it_did_not_make_is_not_touched(script: str, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = run(script, tmp_path, CXX=sys.executable)
    assert done.returncode == 1
    assert "was not made by this set-up" in done.stderr
    assert (tmp_path / "mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "missing"), [("setup_docs.py", "mkdocs"), ("setup_evalscope.py", "evalscope")])
def test_without_the_wheels_it_fails_with_the_reason(script: str, missing: str, tmp_path: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    done = run(script, tmp_path / "venv", **variables)
    assert done.returncode == 1, done.stdout
    assert f"No matching distribution found for {missing}" in done.stderr
    assert "what is finished is not done twice" in done.stderr


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds one wheel, and nothing elsewhere; it installs nothing."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = f"{NAME}-{VERSION}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        for name, text in files.items()
    ]
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": "\n".join([*record, f"{info}/RECORD,,"])}.items():
            wheel.writestr(name, text)
    settings = {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull, "DRY_RUN": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment whose Python is that of the tests."""
    env = Environment(tmp_path / "venv")
    env.state.mkdir(parents=True)
    env.python.parent.mkdir()
    env.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    env.python.chmod(0o755)
    return env


def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "docs.txt"
    file.write_text(text)
    monkeypatch.setattr(setup_docs, "LOCK", file)


def install(env: Environment) -> str:
    return setup_docs.install_packages(env, Runner(env.state / "packages.log", "packages"))


def test_the_file_that_the_lock_names_is_installed(
    index: Path, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    lock(tmp_path, monkeypatch, f"{NAME}=={VERSION} --hash=sha256:{digest}\n")
    assert install(env) == ""
    assert f"Would install {NAME}-{VERSION}" in (env.state / "packages.log").read_text()


def test_a_file_with_another_hash_is_never_installed(
    index: Path, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The looser requirements would take the very same file, unchecked."""
    lock(tmp_path, monkeypatch, f"{NAME}=={VERSION} --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(setup_docs, "LOOSE", (NAME,))
    with pytest.raises(SetupError, match=r"(?s)another hash than docs\.txt says.*DO NOT MATCH THE HASHES"):
        install(env)
    assert "Would install" not in (env.state / "packages.log").read_text()


def test_where_a_version_cannot_be_had_another_one_is_taken_and_said(
    index: Path, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(tmp_path, monkeypatch, f"{NAME}==1.6.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(setup_docs, "LOOSE", (NAME,))
    assert install(env) == f"not all versions of docs.txt can be had here: took what {NAME} allows"
    assert (env.state / "unlocked").exists()
    steps = {step.name: step for step in setup_docs.steps("")}
    (env.state / "packages").write_text(steps["packages"].key)
    assert is_done(steps["packages"], env), "the resolver chose the versions"


def test_without_a_network_it_says_so_after_seconds(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip asked six times for each package, and its failure looked like a version that cannot be had."""
    lock(tmp_path, monkeypatch, f"{NAME}==1.6.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    start = time.monotonic()
    with pytest.raises(SetupError, match="there is no network"):
        install(env)
    assert time.monotonic() - start < 15
    assert not (env.state / "unlocked").exists()


def test_a_disk_that_pip_finds_full_is_named(env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other versions it would have filled it again."""
    lock(tmp_path, monkeypatch, f"{NAME}==1.6.0 --hash=sha256:{'0' * 64}\n")
    asked = tmp_path / "asked"
    env.python.write_text(
        f"#!/bin/sh\ncase $* in *' download '*) exit 0 ;; esac\necho x >> '{asked}'\n"
        "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'\nexit 1\n"
    )
    with pytest.raises(SetupError, match="the disk is full"):
        install(env)
    assert asked.read_text() == "x\n"
