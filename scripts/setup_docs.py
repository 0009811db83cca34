"""Set up `.venv-docs`, where `make docs` finds MkDocs. Run by it and by `make test`.

The site's tools share packages with vLLM and evalscope in other versions, so they get an environment of their own:
thirty small wheels. The steps resume and stamp themselves like those of setup_venv.py, whose machinery this uses.
Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from setup_venv import (
    ROOT,
    Environment,
    Runner,
    Step,
    choose_python,
    is_done,
    locked_set_up,
    make_environment,
    pip,
    prepare,
    read_pins,
    run_steps,
)

VENV = ROOT / ".venv-docs"
LOCK = ROOT / "requirements/docs.txt"
LOOSE = ("mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10")  # where a version of the lock cannot be had


def install_packages(env: Environment, run: Runner) -> str:
    (env.state / "unlocked").unlink(missing_ok=True)
    if run.attempt(pip(env, "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(LOCK))):
        return ""
    (env.state / "unlocked").touch()
    run.must(pip(env, *LOOSE))
    return f"not all versions of {LOCK.name} can be had here: took what {' and '.join(LOOSE)} resolve to"


def steps(python: str) -> list[Step]:
    lock = LOCK.read_text()
    return [
        Step("environment", "a Python of its own", lambda env, run: make_environment(env, run, choose_python(python))),
        Step("packages", "MkDocs and its theme, 20 MB", install_packages, [lock, *LOOSE], read_pins(LOCK)),
    ]


def set_up(env: Environment, python: str = "") -> None:
    """Brings the environment up to date: every step that is not done."""
    prepare(env, python)
    table = steps(python)
    run_steps(env, table, [step for step in table if not is_done(step, env)], "0.2 GB")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=VENV, help="where (default: .venv-docs)")
    parser.add_argument("--python", default="", help="the interpreter to use, instead of the first suitable one")
    options = parser.parse_args(arguments)
    venv = options.venv.resolve()
    venv.parent.mkdir(parents=True, exist_ok=True)
    return locked_set_up(venv.parent, lambda: set_up(Environment(venv), options.python))


if __name__ == "__main__":
    sys.exit(main())
