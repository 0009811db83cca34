"""What the set-up of each environment asks pip for, and what it says when pip cannot."""

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

from scripts.setup import environments
from scripts.setup.environments import ENVIRONMENTS, TORCH, TORCH_CPU_INDEX
from scripts.setup.machine import Environment, Run, SetupError, Step, lock_step, read_pins
from tests.scripts.shell import SCRIPTS, write_program
from tests.serving.server import free_port

NAME, VERSION = "mkdocs", "1.6.1"
WHEEL = f"{NAME}-{VERSION}-py3-none-any.whl"


def run(name: str, venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "setup/environments.py"), name, "--venv", str(venv)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_folder_that_it_did_not_make_is_not_touched(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = run(name, tmp_path, CXX=sys.executable)
    assert done.returncode == 1
    assert "was not made by this set-up" in done.stderr
    assert (tmp_path / "mine").exists()


def test_a_missing_compiler_is_named_before_anything_is_made(tmp_path: Path) -> None:
    done = run("emulated", tmp_path / "venv", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_without_the_wheels_it_fails_with_the_reason(tmp_path: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    done = run("docs", tmp_path / "it's a venv", **variables)
    assert done.returncode == 1, done.stdout
    assert "No matching distribution found for mkdocs" in done.stderr
    assert "what is finished is not done twice" in done.stderr


def test_another_python_than_the_emulated_910b_s_is_meant_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(wanted: str, versions: tuple[str, ...]) -> str:
        if wanted == "python3.12" and "3.12" not in versions:
            raise SetupError(wanted)
        return wanted or "python3.11"

    monkeypatch.setattr(environments, "choose_python", choose)
    chosen = {name: recipe.find_python("python3.12") for name, recipe in ENVIRONMENTS.items()}
    assert {name for name, python in chosen.items() if python != "python3.12"} == {"emulated", "emulated-9.1"}


class Recorder(Run):
    """Keeps the commands and fails those that hold one of `failing`."""

    def __init__(self, env: Environment, *failing: str) -> None:
        super().__init__(env, "a step", "a test")
        env.index_reached = env.uv_tried = True  # and there is no uv
        self.failing, self.commands = failing, []

    def attempt(self, *command: str, **variables: str) -> bool:
        self.commands.append(" ".join(command))
        return not any(text in self.commands[-1] for text in self.failing)


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment whose Python is that of the tests."""
    env = Environment(tmp_path / "venv")
    env.state.mkdir(parents=True)
    write_program(env.python, f'exec "{sys.executable}" "$@"')
    return env


def step(name: str, environment: str = "cpu") -> Step:
    return next(step for step in ENVIRONMENTS[environment].steps(True) if step.name == name)


def test_torch_comes_from_the_users_pip_before_any_other_place(env: Environment) -> None:
    run = Recorder(env)
    step("torch").action(run)
    (command,) = run.commands
    assert command.endswith(f"torch=={TORCH}+cpu")
    assert "--index-url" not in command


def test_torch_falls_back_to_the_registrys_build_and_says_so(env: Environment, capsys: pytest.CaptureFixture) -> None:
    run = Recorder(env, "+cpu")
    step("torch").action(run)
    assert f"--index-url {TORCH_CPU_INDEX} --timeout 15 --retries 0" in run.commands[1]
    assert run.commands[2].endswith(f"torch=={TORCH}")
    assert "--no-deps" not in run.commands[2], "the CUDA build does not import without its libraries"
    assert "several GB" in capsys.readouterr().out


def test_a_missing_version_falls_back_to_the_loose_requirements(env: Environment) -> None:
    for failing, said, how in (
        ("requirements/cpu.txt", "cpu.in", "--constraint requirements/cpu.in"),
        *[("none", "", "--no-deps")],
    ):
        run = Recorder(env, failing)
        assert said in (step("packages").action(run) or "")
        step("vllm").action(run)
        assert run.commands[-1].endswith(how), "vLLM's own requirements are resolved where the lock's are"


def test_the_environment_for_a_gpu_has_nothing_that_its_lock_does_not_name(env: Environment) -> None:
    run = Recorder(env)
    step("packages", "cuda").action(run)
    (command,) = run.commands
    assert command.endswith("requirements/cuda.txt")
    assert "--no-deps --require-hashes --only-binary :all:" in command
    failing = Recorder(env, "requirements/cuda.txt")
    with pytest.raises(SetupError, match="this step failed"):  # no other versions in their place
        step("packages", "cuda").action(failing)
    step("npu_gptoss", "cuda").action(run)
    assert "emulator" not in run.commands[-1]


def test_what_triton_compiles_with_is_asked_for_before_gigabytes_are_downloaded(
    env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [found.name for found in ENVIRONMENTS["cuda"].steps(False)]
    assert names.index("compiler") < names.index("packages")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SetupError, match=r"no-such-compiler.*apt install gcc"):
        step("compiler", "cuda").action(Recorder(env))
    monkeypatch.setenv("CC", sys.executable)
    env.python.write_text("#!/bin/sh\necho /nowhere/python3.12/Python.h\n")
    with pytest.raises(SetupError, match=r"/nowhere/python3\.12/Python\.h.*apt install python3\.12-dev"):
        step("compiler", "cuda").action(Recorder(env))


def test_a_machine_without_a_wheel_of_shellcheck_does_without_it(env: Environment) -> None:
    run = Recorder(env, "shellcheck")
    assert "not linted" in step("tools").action(run)
    assert "--only-binary :all:" in run.commands[-1], "its source release would download a program"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """pip finds one wheel in a folder, and nothing elsewhere; it installs nothing. Returns the wheel's SHA-256."""
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
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull, "DRY_RUN": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


def install(env: Environment, requirement: str) -> tuple[str | None, str]:
    """What the step says of a lock of one hashed line, and its log."""
    lock = env.path / "docs.txt"
    lock.write_text(requirement + "\n")
    run = Run(env, "packages", "packages")
    said = lock_step("a test", lock, (NAME,), ("--require-hashes",)).action(run)
    return said, run.logged()


def test_the_file_that_the_lock_names_is_installed(index: str, env: Environment) -> None:
    said, log = install(env, f"{NAME}=={VERSION} --hash=sha256:{index}")
    assert not said
    assert f"Would install {NAME}-{VERSION}" in log


def test_a_file_with_another_hash_is_never_installed(index: str, env: Environment) -> None:
    """The looser requirements would take the very same file, unchecked."""
    with pytest.raises(SetupError, match=r"(?s)another hash than docs\.txt.*DO NOT MATCH THE HASHES"):
        install(env, f"{NAME}=={VERSION} --hash=sha256:{'0' * 64}")
    assert "Would install" not in (env.state / "packages.log").read_text()


def test_where_a_version_cannot_be_had_another_one_is_taken_and_said(index: str, env: Environment) -> None:
    said, log = install(env, f"{NAME}==1.6.0 --hash=sha256:{'0' * 64}")
    assert "docs.txt" in said
    assert f"Would install {NAME}-{VERSION}" in log
    lock = lock_step("a test", env.path / "docs.txt", (NAME,))
    (env.state / "packages").write_text(lock.key)
    assert lock.is_done(env), "the resolver chose the versions"


def test_without_a_network_it_says_so_after_seconds(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asked six times for each package, and its failure looked like a version that cannot be had."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    start = time.monotonic()
    with pytest.raises(SetupError, match="there is no network"):
        install(env, f"{NAME}==1.6.0 --hash=sha256:{'0' * 64}")
    assert time.monotonic() - start < 15
    assert not (env.state / "unlocked").exists()


def test_a_disk_that_pip_finds_full_is_named(env: Environment) -> None:
    """With other versions it would have filled it again."""
    env.python.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device'; exit 1\n")
    env.index_reached = True
    with pytest.raises(SetupError, match="the disk is full"):
        install(env, f"{NAME}==1.6.0")
    assert not (env.state / "unlocked").exists()


def test_the_tests_of_line_0_33_have_the_versions_that_are_served_and_of_cuda_triton_alone(env: Environment) -> None:
    run = Recorder(env)
    step("packages", "vllm033").action(run)
    asked = dict(word.split("==") for word in run.commands[0].split() if "==" in word)
    served = read_pins(environments.REQUIREMENTS / "cuda.txt")
    assert {"transformers", "oss-harmony", "xgrammar", "pydantic", "triton"} <= asked.keys() & served.keys()
    assert {name for name in asked.keys() & served.keys() if asked[name] != served[name]} == set()
    assert not any(name.startswith(("nvidia-", "cuda-", "torch", "vllm")) for name in asked)
