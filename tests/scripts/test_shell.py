"""The shell scripts are POSIX sh, and what they quote a shell reads back."""

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


def test_the_scripts_are_there() -> None:
    assert {path.name for path in FILES} >= {"serve.sh", "perf.sh", "eval.sh", "mmlu.sh", "lib.sh"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sh_reads_it(path: Path) -> None:
    subprocess.run(["sh", "-n", str(path)], check=True)


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=environment()["PATH"])
    if program is None:
        pytest.skip("shellcheck is not installed: make setup, where it has a wheel")
    done = subprocess.run([program, "-x", *map(str, FILES)], cwd=SCRIPTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_it_can_be_executed_and_helps(path: Path) -> None:
    assert path.stat().st_mode & 0o111, "not executable"
    done = run(path.name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: scripts/{path.name}")
    options = set(re.findall(r"^    (--[a-z][a-z-]*)(?: \| -h)?\)", path.read_text(), re.M))
    assert len(options) > 5
    assert [option for option in sorted(options) if f"\n  {option} " not in done.stdout] == []


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nonsense",), "there is no option --nonsense; --help lists them"),
        (("extra",), "there is no option extra"),
        (("--model",), "--model wants a value"),
    ],
)
def test_an_option_that_cannot_be_is_told_in_words(path: Path, options: tuple[str, ...], words: str) -> None:
    done = run(path.name, *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path.name}: ")
    assert words in done.stderr


@pytest.mark.parametrize("word", ["plain", "", "two words", "it's", '{"a": [1, 2]}', "$HOME", "a\\b", "*", "-x", "ä"])
def test_quoted_words_come_back_from_a_shell(word: str) -> None:
    script = 'program=test; . "$1/lib.sh"; quoted first "$2" last'
    done = subprocess.run(["sh", "-c", script, "sh", str(SCRIPTS), word], capture_output=True, text=True, check=True)
    assert shlex.split(done.stdout) == ["first", word, "last"]
