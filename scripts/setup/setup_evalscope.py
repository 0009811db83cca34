"""Set up `.venv-evalscope`, where scripts/perf.sh and scripts/eval.sh find evalscope. Run by `make setup-evalscope`.

evalscope's pins fight with vLLM's, so it gets an environment of its own; it talks to the server over HTTP only. The
steps resume and stamp themselves like those of setup_venv.py, whose machinery this uses. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from setup_venv import (
    ROOT,
    Environment,
    Runner,
    Step,
    choose_python,
    install_lock,
    make_environment,
    read_pins,
    set_up_alone,
)

VENV = ROOT / ".venv-evalscope"
LOCK = ROOT / "requirements/evalscope.txt"
LOOSE = ("evalscope[perf]>=1.14.1,<1.15", "matplotlib")  # where a version of the lock cannot be had
MODULES = (
    "evalscope.run",
    "evalscope.benchmarks",
    "evalscope.perf.main",
    "evalscope.report",
    "math_verify",
    "matplotlib.figure",
)


def install_packages(env: Environment, run: Runner) -> str:
    return install_lock(env, run, LOCK, LOOSE)


def import_modules(env: Environment, run: Runner) -> str:
    run.must([str(env.python), "-c", f"import {', '.join(MODULES)}"])
    return ""


def steps(python: str) -> list[Step]:
    lock = LOCK.read_text()
    return [
        Step("environment", "a Python of its own", lambda env, run: make_environment(env, run, choose_python(python))),
        Step("packages", "evalscope and what it imports, 170 MB", install_packages, [lock, *LOOSE], read_pins(LOCK)),
        Step("imports", "imported once: it works, and Python keeps it compiled", import_modules, [lock, *MODULES]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return set_up_alone(__doc__.splitlines()[0], VENV, steps, "0.8 GB", arguments)


if __name__ == "__main__":
    sys.exit(main())
