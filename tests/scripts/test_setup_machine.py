"""The steps of a set-up: what is done once, what is done again, and what is never touched."""

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

from scripts.setup import machine
from scripts.setup.machine import Environment, SetupError, Step, bring_up_to_date, choose_python, prepare
from tests.scripts.shell import write_program


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that passes for a usable one, with the packages that a test puts into `packages`."""
    env = Environment(tmp_path / ".venv")
    env.state.mkdir(parents=True)
    monkeypatch.setattr(Environment, "inspect", lambda self: None)
    return env


class Table:
    """Steps of these names; `ran` tells which ones did, `failing` what a step raises."""

    def __init__(self, env: Environment, *names: str, after: dict[str, str] | None = None) -> None:
        self.env, self.ran, self.failing = env, [], {}
        self.steps = [self.step(name, after=[after[name]] if name in (after or {}) else []) for name in names]

    def step(self, name: str, **rest: object) -> Step:
        def act(run: object) -> None:
            self.ran.append(name)
            if name in self.failing:
                raise self.failing.pop(name)

        return Step(name, "a test", act, [name], **rest)

    def run(self) -> list[str]:
        self.ran.clear()
        bring_up_to_date(self.env, self.steps, "1 GB")
        return self.ran


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SetupError("no network")])
def test_an_interrupted_step_is_redone_and_finished_ones_are_not(env: Environment, error: BaseException) -> None:
    table = Table(env, "first", "second", "third")
    table.failing["second"] = error
    with pytest.raises(type(error)):
        table.run()
    assert table.ran == ["first", "second"]
    assert table.run() == ["second", "third"]
    assert table.run() == []


def test_what_comes_after_a_step_runs_with_it_even_when_that_was_interrupted(env: Environment) -> None:
    table = Table(env, "wheels", "other", "libraries", after={"libraries": "wheels"})
    assert table.run() == ["wheels", "other", "libraries"]
    (env.state / "wheels").unlink()
    table.failing["libraries"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        table.run()
    assert table.ran == ["wheels", "libraries"]
    assert table.run() == ["libraries"]


def test_changed_requirements_run_the_step_again_and_its_old_stamp_goes_first(env: Environment) -> None:
    old = Step("packages", "", None, ["numpy==1"])
    (env.state / "packages").write_text(old.key)
    assert old.is_done(env)
    assert not Step("packages", "", None, ["numpy==2"]).is_done(env)
    table = Table(env, "packages")
    table.failing["packages"] = SetupError("no network")
    with pytest.raises(SetupError):
        table.run()
    assert not old.is_done(env)


def test_a_package_that_was_removed_or_changed_by_hand_is_noticed(env: Environment) -> None:
    step = Step("packages", "", None, [], {"numpy": "2.2.6"})
    (env.state / "packages").write_text(step.key)
    for packages, done in (({}, False), ({"numpy": "2.4.0"}, False), ({"numpy": "2.2.6"}, True)):
        env.packages = packages
        assert step.is_done(env) == done


def test_metadata_of_an_interrupted_installation_is_dropped(env: Environment) -> None:
    packages = env.path / "lib" / "python3.11" / "site-packages"
    for name in ("half-1.0.dist-info", "whole-1.0.dist-info"):
        (packages / name).mkdir(parents=True)
    (packages / "whole-1.0.dist-info" / "RECORD").write_text("")
    Table(env, "any").run()
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_broken_moved_and_half_made_environments_are_recognised(tmp_path: Path) -> None:
    env = Environment(tmp_path / ".venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env.path)], check=True)
    env.state.mkdir()
    (env.state / "location").write_text(str(env.path))
    assert "an older set-up" in env.inspect()
    (env.state / machine.PLACE).write_text("/elsewhere/.venv")
    assert "/elsewhere/.venv and moved" in env.inspect()
    (env.state / machine.PLACE).write_text(str(env.path))
    assert "No module named 'pip'" in env.inspect()
    for name in ("python", "python3"):
        (env.path / "bin" / name).unlink()
    assert "no bin/python" in env.inspect()


def test_a_broken_environment_is_made_anew_and_a_foreign_one_left_alone(tmp_path: Path) -> None:
    env = Environment(tmp_path / ".venv")
    env.path.mkdir()
    with pytest.raises(SetupError, match="was not made by this set-up"):
        prepare(env, "")
    assert env.path.is_dir()
    env.state.mkdir()
    prepare(env, "")
    assert not env.path.exists()


def test_an_environment_of_another_python_than_the_wanted_is_made_anew(env: Environment) -> None:
    for name, version in (("bin/python", "3.11.7"), ("wanted", "3.12.1")):
        write_program(env.path / name, f"echo Python {version}")
    prepare(env, str(env.python))
    assert env.path.exists()
    prepare(env, str(env.path / "wanted"))
    assert not env.path.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("echo 3.7", r"is Python 3\.7.*PYTHON="),
        ("echo \"No module named 'ensurepip'\" >&2; exit 1", r"apt install python3\.11-venv"),
        ("exit 1", "does not start"),
        (None, "is not there"),
    ],
)
def test_no_usable_python_is_told_with_the_reason(tmp_path: Path, program: str | None, words: str) -> None:
    path = tmp_path / "python3.11"
    if program:
        write_program(path, program)
    with pytest.raises(SetupError, match=words):
        choose_python(str(path), ("3.11", "3.12"))


def test_a_full_disk_is_told_before_anything_is_made(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2e9}))
    run = machine.Run(env, "environment", "a test")
    with pytest.raises(SetupError, match=r"2\.0 GB are free"):
        machine.make_environment(run, sys.executable)


def test_the_machines_packages_do_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/mirror")
    cleaned = machine.clean_environment()
    assert "PYTHONPATH" not in cleaned
    assert cleaned["PIP_USER"] == "0"
    assert cleaned["PIP_FIND_LINKS"] == "/mirror", "the user's pip configuration has to stay"


HOLD = """
import sys
from pathlib import Path
from scripts.setup.machine import alone_in

def work():
    print("locked", flush=True)
    sys.stdin.read()
    (Path(sys.argv[1]) / "finished").touch()

alone_in(Path(sys.argv[1]), work)
"""


@pytest.fixture
def alone_in() -> Callable[[Path, Callable[[], None]], int]:
    """The one of the script, which takes the process's signals; they are given back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield machine.alone_in
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_second_set_up_of_an_environment_waits_for_the_first_and_another_one_does_not(
    tmp_path: Path, alone_in: Callable
) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=machine.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout.readline() == b"locked\n"
        assert alone_in(tmp_path / "another", lambda: None) == 0
        assert not (tmp_path / "finished").exists()
        threading.Timer(0.3, first.stdin.close).start()
        seen = []
        assert alone_in(tmp_path, lambda: seen.append((tmp_path / "finished").exists())) == 0
        assert seen == [True]
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SetupError("no network"), 1, ("set-up: no network",)),
        (KeyboardInterrupt(), 130, ("finished steps are skipped",)),
        (errno.ENOSPC, 1, (".venv", "The disk is full", "3 GB")),
        (errno.EROFS, 1, (".venv", "Read-only file system", "git clone")),
        (errno.EACCES, 1, (".venv", "belongs to the user", "git clone")),
    ],
    ids=["error", "Ctrl-C", "full", "read-only", "another's"],
)
def test_a_set_up_that_ends_early_says_why_and_unlocks(
    error: BaseException | int,
    status: int,
    words: tuple[str, ...],
    tmp_path: Path,
    alone_in: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(machine.os, "getuid", lambda: tmp_path.stat().st_uid + 1)

    def fail() -> None:
        raise OSError(error, os.strerror(error), str(tmp_path / ".venv")) if isinstance(error, int) else error

    assert alone_in(tmp_path, fail) == status
    told = capsys.readouterr().err
    assert [word for word in words if word not in told] == []
    assert alone_in(tmp_path, lambda: None) == 0
    assert "waiting" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, alone_in: Callable) -> None:
    (tmp_path / "file").touch()
    assert alone_in(tmp_path / "file/folder", lambda: pytest.fail("it worked")) == 1
