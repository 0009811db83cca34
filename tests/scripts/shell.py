"""Runs the shell scripts of scripts/ as a user does."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
EVALSCOPE = ROOT / ".venv-evalscope/bin/python"
needs_evalscope = pytest.mark.skipif(not EVALSCOPE.exists(), reason="evalscope is not set up; make setup-evalscope")
# evalscope's and vLLM's own variables on the machine that tests would change what is looked at
DROPPED = ("VLLM_", "HF_", "OMP_", "NPU_GPTOSS_", "ASCEND_", "HCCL_")


# what `make test` hands down, and would change what a make of the tests does and prints
FROM_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ON", "MODEL", "HOST", "PORT", "ARGS", "EMULATE")


def make(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """As from a user's shell, also where the tests run under a make."""
    kept = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
    return subprocess.run(["make", *words], cwd=cwd, env=kept | variables, capture_output=True, text=True)


def environment(**variables: str) -> dict[str, str]:
    """The variables of a user with the tests' environment activated and nothing set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", **variables}


def run(
    script: str, *options: str | Path, scripts: Path = SCRIPTS, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(scripts / script), *map(str, options)]
    done = subprocess.run(
        command,
        cwd=scripts.parent,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-6000:])  # pytest shows it when the test fails
    return done


def write_program(path: Path, text: str) -> Path:
    """A script of sh that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def beside_a_fake_evalscope(folder: Path, status: int) -> Path:
    """A copy of the scripts, and an evalscope that does nothing and ends with `status`."""
    scripts, programs = folder / "scripts", folder / ".venv-evalscope" / "bin"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    write_program(programs / "evalscope", f"exit {status}")
    # not a link: an interpreter of an environment that is called by another name looks for its packages elsewhere
    write_program(programs / "python", f'exec "{sys.executable}" "$@"')
    return scripts


def report(*options: str | Path) -> str:
    """The output of eval_report.py under the Python of evalscope's environment."""
    command = [str(EVALSCOPE), str(SCRIPTS / "eval_report.py"), *map(str, options)]
    return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout


def printed_command(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], list[str]]:
    """The variables and the words of the one line that --dry-run printed."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    variables = {}
    if words[0] == "env":
        words = words[1:]
        while "=" in words[0] and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
    return variables, words


def following(words: list[str], flag: str) -> str:
    """The value of a flag; the last one when it is given twice, as the programs read it."""
    return words[len(words) - words[::-1].index(flag)]
