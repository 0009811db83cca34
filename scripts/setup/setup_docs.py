"""Set up `.venv-docs`, where `make docs` finds MkDocs. Run by it and by `make test`.

The site's tools share packages with vLLM and evalscope in other versions, so they get an environment of their own:
thirty small wheels. The steps resume and stamp themselves like those of setup_venv.py, whose machinery this uses.
Standard library only.
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

VENV = ROOT / ".venv-docs"
LOCK = ROOT / "requirements/docs.txt"
LOOSE = ("mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10")  # where a version of the lock cannot be had


def install_packages(env: Environment, run: Runner) -> str:
    return install_lock(env, run, LOCK, LOOSE, "--require-hashes", "--only-binary", ":all:")


def steps(python: str) -> list[Step]:
    lock = LOCK.read_text()
    return [
        Step("environment", "a Python of its own", lambda env, run: make_environment(env, run, choose_python(python))),
        Step("packages", "MkDocs and its theme, 20 MB", install_packages, [lock, *LOOSE], read_pins(LOCK)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return set_up_alone(__doc__.splitlines()[0], VENV, steps, "0.2 GB", arguments)


if __name__ == "__main__":
    sys.exit(main())
