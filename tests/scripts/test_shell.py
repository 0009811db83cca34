"""The shell scripts are POSIX sh, and a shell reads back the words that they quote."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.shell import SCRIPTS, environment, run

FILES = sorted(SCRIPTS.glob("*.sh"))
RUNNABLE = [path for path in FILES if path.name not in ("lib.sh", "mmlu.sh")]  # sourced; the short form of another


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sh_reads_it(path: Path) -> None:
    subprocess.run(["sh", "-n", str(path)], check=True)


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=environment()["PATH"])
    if program is None:
        pytest.skip("shellcheck is not installed: make setup, where it has a wheel")
    done = subprocess.run([program, "-x", *map(str, FILES)], cwd=SCRIPTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["eval.sh", "perf.sh", "serve.sh"])
def test_it_can_be_executed_and_helps(name: str) -> None:
    path = SCRIPTS / name
    assert path.stat().st_mode & 0o111, "not executable"
    done = run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: scripts/{name}")
    options = set(re.findall(r"^    (--[a-z][a-z-]*)(?: \| -h)?\)", path.read_text(), re.M))
    assert len(options) > 5
    assert [option for option in sorted(options) if f"\n  {option} " not in done.stdout] == []


@pytest.mark.parametrize("name", [path.name for path in RUNNABLE])
@pytest.mark.parametrize("option", ["--nonsense", "extra", "--model"])
def test_an_option_that_cannot_be_is_named(name: str, option: str) -> None:
    done = run(name, option)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: ")
    assert option in done.stderr


@pytest.mark.parametrize("word", ["plain", "", "two words", "it's", '{"a": [1, 2]}', "$HOME", "a\\b", "*", "-x", "ä"])
def test_quoted_words_come_back_from_a_shell(word: str) -> None:
    script = 'program=test; . "$1/lib.sh"; quoted first "$2" last'
    done = subprocess.run(["sh", "-c", script, "sh", str(SCRIPTS), word], capture_output=True, text=True, check=True)
    assert shlex.split(done.stdout) == ["first", word, "last"]
