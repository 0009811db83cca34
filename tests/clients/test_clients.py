"""Foreign clients, in versions of two years, against each release of vLLM: `make test-clients`.

The programs of `programs/` and `js/` run in the clients' environments and say which of their cases failed; each case is
a test here. A program is run once.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.places import TODAY, YEARS, venv
from tests.serving.server import Server

pytestmark = [pytest.mark.clients, pytest.mark.slow]

HERE = Path(__file__).parent
NEW = {"anthropic_sdk"}  # of today alone: in 2025 no server of gpt-oss had /v1/messages
PROGRAMS = sorted(path for path in (HERE / "programs").glob("*.py") if path.name != "runner.py")
AGENTS = HERE / "js/agents.mjs"
Record = Callable[[str, object], None]
LIMIT = 500  # seconds for all cases of one program
TRANSPORT = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
# by (year, program, case): what a client of that year does itself, whatever the server says
CANNOT: dict[tuple[str, str, str], str] = {
    ("2025", "instructor_sdk", "case_responses_by_a_tool"): "takes the first item for the call; reasoning comes first",
    ("2025", "litellm_sdk", "case_responses_stream_a_call"): "fakes the streams of models that are not in its list",
}


def cases_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("case_")]


@functools.cache
def failures(command: tuple[str, ...], folder: Path) -> dict[str, str | None]:
    """case -> its failure, or None. Its output, under "", stands for cases that it never came to."""
    done = subprocess.run(
        command, cwd=folder, env=TRANSPORT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    found = {one["case"]: one["failure"] for one in said}
    return {**found, "": found.get("import") or (done.stdout + done.stderr)[-3000:]}


def run_python(year: str, program: Path, server: Server) -> dict[str, str | None]:
    python = venv(year) / "bin/python"
    if not python.exists():
        pytest.fail(f"{venv(year).name} is not set up; run: make test-clients")
    runner = str(HERE / "programs/runner.py")
    return failures((str(python), runner, str(program), f"{server.url}/v1", server.name), HERE)


@pytest.mark.parametrize(
    ("program", "case", "year"),
    [
        pytest.param(program, case, year, id=f"{program.stem}-{case}-{year}")
        for program in PROGRAMS
        for case in cases_of(program)
        for year in (YEARS if program.stem not in NEW else [TODAY])
    ],
)
def test_python(year: str, program: Path, case: str, server: Server, record_property: Record) -> None:
    record_property("client", f"{program.stem} {year}")
    found = run_python(year, program, server)
    if reason := CANNOT.get((year, program.stem, case)):
        assert found.get(case), f"it works now, though it is said that it cannot: {reason}"
        pytest.xfail(reason)
    if words := found.get(case, found[""]):
        pytest.fail(words, pytrace=False)


def run_javascript(year: str, server: Server) -> dict[str, str | None]:
    """`node` in the folder of packages of that year, from where the program takes them."""
    folder = venv(year) / "js"
    if not (folder / "node_modules").is_dir():
        if not shutil.which("npm"):
            pytest.skip("there is no npm here")
        pytest.fail(f"{folder} has no packages; run: make test-clients")
    return failures(("node", str(AGENTS), f"{server.url}/v1", server.name), folder)


@pytest.mark.parametrize("year", YEARS)
def test_javascript(year: str, server: Server, record_property: Record) -> None:
    record_property("client", f"javascript {year}")
    found = run_javascript(year, server)
    ended = found.pop("")
    assert len(found) >= 13, ended
    if wrong := [f"{case}: {words}" for case, words in found.items() if words]:
        pytest.fail("\n".join(wrong), pytrace=False)
