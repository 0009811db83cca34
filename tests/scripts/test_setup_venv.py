"""The set-up of `.venv`: what is done once, what is done again, and what is never touched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.setup import setup_venv
from scripts.setup.setup_venv import Environment, SetupError, Step


class Recorder:
    """Stands in for a Runner: keeps the commands and fails those that hold one of `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.commands = failing, []

    def attempt(self, command: list[str]) -> bool:
        self.commands.append(" ".join(command))
        return not any(text in self.commands[-1] for text in self.failing)

    def logged(self, text: str) -> bool:
        return False

    def likely(self) -> None:
        return None

    def must(self, command: list[str]) -> None:
        if not self.attempt(command):
            raise SetupError(self.commands[-1])


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that passes for a usable one, with the packages that a test puts into `packages`."""
    env = Environment(tmp_path / ".venv", asked=True)
    env.state.mkdir(parents=True)
    monkeypatch.setattr(Environment, "inspect", lambda self: None)
    return env


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`table(first=…, second=…)` replaces the steps by these actions; the list it returns tells which ones ran."""
    ran: list[str] = []

    def make(**actions: Callable[[], None]) -> list[str]:
        def step(name: str) -> Step:
            def act(env: Environment, run: object) -> str:
                ran.append(name)
                actions[name]()
                return ""

            return Step(name, "a test", act, [name])

        monkeypatch.setattr(setup_venv, "steps", lambda *_: [step(name) for name in actions])
        return ran

    return make


def test_an_interrupted_step_is_redone_and_finished_ones_are_not(env: Environment, table: Callable) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ran = table(first=lambda: None, second=interrupt, third=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        setup_venv.set_up(env, with_tools=False)
    assert ran == ["first", "second"]
    ran.clear()
    table(first=lambda: None, second=lambda: None, third=lambda: None)
    setup_venv.set_up(env, with_tools=False)
    assert ran == ["second", "third"]
    ran.clear()
    setup_venv.set_up(env, with_tools=False)
    assert ran == []


def test_a_step_that_fails_anew_does_not_keep_its_old_stamp(env: Environment, table: Callable) -> None:
    step = Step("packages", "a test", lambda env, run: "", ["old"])
    (env.state / "packages").write_text(step.key)

    def fail() -> None:
        raise SetupError("no network")

    table(packages=fail)  # with other inputs, hence to be done again
    with pytest.raises(SetupError):
        setup_venv.set_up(env, with_tools=False)
    assert not setup_venv.is_done(step, env)


def test_changed_requirements_run_the_step_again(env: Environment) -> None:
    (env.state / "packages").write_text(Step("packages", "", None, ["numpy==1"]).key)
    assert setup_venv.is_done(Step("packages", "", None, ["numpy==1"]), env)
    assert not setup_venv.is_done(Step("packages", "", None, ["numpy==2"]), env)


def test_a_package_that_was_removed_or_changed_by_hand_is_noticed(env: Environment) -> None:
    step = Step("packages", "", None, [], {"numpy": "2.2.6"})
    (env.state / "packages").write_text(step.key)
    assert not setup_venv.is_done(step, env)
    env.packages = {"numpy": "2.4.0"}
    assert not setup_venv.is_done(step, env)
    env.packages = {"numpy": "2.2.6"}
    assert setup_venv.is_done(step, env)


def test_a_folder_that_someone_else_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "precious").write_text("data")
    with pytest.raises(SetupError, match="was not made by this set-up"):
        setup_venv.set_up(Environment(tmp_path / ".venv"), with_tools=False)
    assert (tmp_path / ".venv" / "precious").read_text() == "data"


def test_broken_moved_and_half_made_environments_are_recognised(tmp_path: Path) -> None:
    env = Environment(tmp_path / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env.path)], check=True)
    env.state.mkdir()
    assert "interrupted" in env.inspect()
    (env.state / "location").write_text("/elsewhere/.venv")
    assert "/elsewhere/.venv and moved" in env.inspect()
    (env.state / "location").write_text(str(env.path))
    assert "No module named 'pip'" in env.inspect()
    for name in ("python", "python3"):
        (env.path / "bin" / name).unlink()
    assert "no bin/python" in env.inspect()


def test_a_broken_environment_is_made_anew(tmp_path: Path, table: Callable, capsys: pytest.CaptureFixture) -> None:
    env = Environment(tmp_path / ".venv")
    env.state.mkdir(parents=True)
    (env.path / "left over").write_text("")
    table()
    setup_venv.set_up(env, with_tools=False)
    assert not (env.path / "left over").exists()
    assert "is made anew" in capsys.readouterr().out


def test_metadata_of_an_interrupted_installation_is_dropped(env: Environment) -> None:
    packages = env.path / "lib" / "python3.11" / "site-packages"
    for name in ("half-1.0.dist-info", "whole-1.0.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").write_text("")
    (packages / "whole-1.0.dist-info" / "RECORD").write_text("")
    setup_venv.drop_half_installed(env)
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_no_usable_python_is_told_with_every_reason(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\necho 3.7\n")
    bare = tmp_path / "python3.11"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'ensurepip'\" >&2; exit 1\n")
    for path in (old, bare):
        path.chmod(0o755)
    with pytest.raises(SetupError, match=r"python-old is Python 3\.7.*PYTHON="):
        setup_venv.choose_python(str(old))
    with pytest.raises(SetupError, match=r"apt install python3\.11-venv"):
        setup_venv.choose_python(str(bare))
    with pytest.raises(SetupError, match="nowhere is not there"):
        setup_venv.choose_python(str(tmp_path / "nowhere"))


def test_torch_comes_from_the_users_pip_before_any_other_place(env: Environment) -> None:
    run = Recorder()
    setup_venv.install_torch(env, run)
    assert len(run.commands) == 1
    assert "+cpu" in run.commands[0]
    assert "--index-url" not in run.commands[0]


def test_torch_falls_back_to_the_registrys_build_and_says_so(env: Environment, capsys: pytest.CaptureFixture) -> None:
    run = Recorder("+cpu")
    setup_venv.install_torch(env, run)
    assert setup_venv.TORCH_CPU_INDEX in run.commands[1]
    assert "--timeout 15 --retries 0" in run.commands[1]
    assert run.commands[2].endswith(f"torch=={setup_venv.TORCH}")
    assert "--no-deps" not in run.commands[2], "the CUDA build does not import without its libraries"
    assert "several GB" in capsys.readouterr().out


def test_a_missing_version_falls_back_to_the_loose_requirements(env: Environment) -> None:
    run = Recorder("requirements/cpu.txt")
    assert "cpu.in" in setup_venv.install_packages(env, run)
    setup_venv.install_vllm(env, run)
    assert run.commands[-1].endswith("--constraint requirements/cpu.in"), "vLLM's own requirements have to be resolved"
    good = Recorder()
    setup_venv.install_packages(env, good)
    setup_venv.install_vllm(env, good)
    assert good.commands[-1].endswith("--no-deps")


def test_a_machine_without_a_wheel_of_shellcheck_does_without_it(env: Environment) -> None:
    run = Recorder("shellcheck")
    assert "not linted" in setup_venv.install_tools(env, run)
    assert "--only-binary :all:" in run.commands[-1], "its source release would download a program"
    assert setup_venv.install_tools(env, Recorder()) == ""


def test_the_machines_packages_do_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/mirror")
    cleaned = setup_venv.clean_environment()
    assert "PYTHONPATH" not in cleaned
    assert cleaned["PIP_USER"] == "0"
    assert cleaned["PIP_FIND_LINKS"] == "/mirror", "the user's pip configuration has to stay"


HOLD = """
import sys
from pathlib import Path
from scripts.setup.setup_venv import locked_set_up

def work():
    print("locked", flush=True)
    sys.stdin.read()
    (Path(sys.argv[1]) / "finished").touch()

locked_set_up(Path(sys.argv[1]), work)
"""


def locked_set_up(folder: Path, work: Callable[[], None]) -> int:
    """The one of the script, which takes the process's signals; here they are given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return setup_venv.locked_set_up(folder, work)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_set_up_in_a_folder_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also where the second one sets up the other environment: both install this folder."""
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=setup_venv.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout.readline() == b"locked\n"
        threading.Timer(0.3, first.stdin.close).start()
        seen = []
        assert locked_set_up(tmp_path, lambda: seen.append((tmp_path / "finished").exists())) == 0
        assert seen == [True]
        assert "waiting for it" in capsys.readouterr().out
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [(SetupError("no network"), 1, "set-up: no network"), (KeyboardInterrupt(), 130, "finished steps are skipped")],
    ids=["error", "Ctrl-C"],
)
def test_a_set_up_that_ends_early_says_so_and_unlocks(
    tmp_path: Path, capsys: pytest.CaptureFixture, error: BaseException, status: int, text: str
) -> None:
    def work() -> None:
        raise error

    assert locked_set_up(tmp_path, work) == status
    assert text in capsys.readouterr().err
    assert locked_set_up(tmp_path, lambda: None) == 0
    assert "waiting" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ("The disk is full", "3 GB", "run the same command again")),
        (errno.EROFS, ("Read-only file system", "a checkout of your own: git clone")),
        (errno.EACCES, ("belongs to the user", "a checkout of your own: git clone")),
    ],
)
def test_what_the_file_system_refuses_is_a_sentence(
    number: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A checkout on a read-only disk, a full one, another user's: each was a traceback."""
    monkeypatch.setattr(setup_venv.os, "getuid", lambda: tmp_path.stat().st_uid + 1)

    def refused() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / ".venv"))

    assert setup_venv.locked_set_up(tmp_path, refused) == 1
    told = capsys.readouterr().err
    assert str(tmp_path / ".venv") in told
    assert [word for word in words if word not in told] == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert setup_venv.locked_set_up(tmp_path / "file/folder", lambda: pytest.fail("it worked")) == 1
    assert "Not a directory" in capsys.readouterr().err
