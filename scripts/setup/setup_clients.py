"""Set up `.venv-clients-2025` and `.venv-clients-2026`, the clients that `make test-clients` sends to a server.

They are packages of others, in versions of two years, so each year has an environment of its own, and JavaScript's
packages beside it, where Node.js is. The steps resume and stamp themselves like those of setup_venv.py, whose machinery
this uses. Standard library only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

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

# where a version of the lock cannot be had
LOOSE = {
    "2025": ("openai<2", "openai-agents<0.4", "langchain-openai<0.4", "pydantic-ai-slim[openai]<1.2", "litellm<1.79"),
    "2026": ("openai", "openai-agents", "langchain-openai", "pydantic-ai-slim[openai]", "litellm", "schemathesis"),
}
MODULES = ("openai", "agents", "langchain_openai", "pydantic_ai.models.openai", "litellm", "instructor")
YEARS = tuple(LOOSE)
NPM = ("package.json", "package-lock.json")


def venv(year: str) -> Path:
    return ROOT / f".venv-clients-{year}"


def javascript(year: str) -> Path:
    return ROOT / "tests/clients/js" / year


def steps(year: str, python: str) -> list[Step]:
    lock, packages = ROOT / f"requirements/clients-{year}.txt", javascript(year)
    modules = (*MODULES, *(("schemathesis",) if "schemathesis" in LOOSE[year] else ()))

    def make(env: Environment, run: Runner) -> str:
        return make_environment(env, run, choose_python(python, ("3.11", "3.12")))

    def install(env: Environment, run: Runner) -> str:
        return install_lock(env, run, lock, (*LOOSE[year], "instructor"))

    def import_modules(env: Environment, run: Runner) -> str:
        run.must([str(env.python), "-c", f"import {', '.join(modules)}"])
        return ""

    def install_javascript(env: Environment, run: Runner) -> str:
        if not shutil.which("npm"):
            return "without JavaScript's clients: there is no npm here (Node.js 20 or newer)"
        folder = env.path / "js"
        folder.mkdir(exist_ok=True)
        for name in NPM:
            shutil.copy(packages / name, folder)
        run.must(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)])
        return ""

    npm = [(packages / name).read_text() for name in NPM]
    return [
        Step("environment", f"a Python of its own, clients of {year}", make),
        Step("packages", "the clients and what they import, 200 MB", install, [lock.read_text()], read_pins(lock)),
        Step("imports", "imported once: they work, and Python keeps them compiled", import_modules, [lock.read_text()]),
        Step("javascript", "JavaScript's clients, 90 MB", install_javascript, [*npm, str(shutil.which("npm"))]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Both years, one after the other, or the --year; the first failure's exit status."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--year", choices=YEARS)
    options, rest = parser.parse_known_args(arguments)
    for year in [options.year] if options.year else YEARS:

        def table(python: str, year: str = year) -> list[Step]:
            return steps(year, python)

        status = set_up_alone(__doc__.splitlines()[0], venv(year), table, "0.8 GB", rest)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
