"""The README and CONTRIBUTING promise nothing that is not there, and their examples run.

The README's request and the client of docs/serving-on-cpu.md run against a real server in
tests/serving/test_openai_api.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gptoss.cli import COMMANDS
from scripts.serve_cpu import TINY_NAME, TINY_QUESTION, example_request
from tests.markdown import PAGES, ROOT, code_blocks, links

README = ROOT / "README.md"
SHELL_LINES = [line for block in code_blocks(README, "sh") for line in block.splitlines()]
COMMAND_LINES = [
    line
    for block in code_blocks(ROOT / "CONTRIBUTING.md", "sh")
    for line in block.splitlines()
    if line.startswith("npu-gptoss ")
]
# they need the trained checkpoint: tests/serving runs the same things on it
NEEDS_CHECKPOINT = ".checkpoints/"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_leads_nowhere(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_every_place_of_the_tree_exists() -> None:
    tree = next(block for block in code_blocks(ROOT / "CONTRIBUTING.md", "") if block.startswith("npu_gptoss/"))
    missing, inside = [], ROOT
    for line in tree.splitlines():
        names = [word for word in re.split(r"\s{2,}", line.strip()) if word]
        places = [word for word in names if re.fullmatch(r"[\w./]+", word)]
        assert places, f"no place in the line {line!r}"
        inside = ROOT / "npu_gptoss" if line.startswith("  ") else ROOT
        missing += [place for place in places if not (inside / place).exists()]
    assert missing == []


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {(page.name, t) for page in PAGES for t in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M)}
    assert {target for _, target in named} >= {"serve", "test"}
    assert [(page, target) for page, target in sorted(named) if target not in targets] == []


def test_every_make_target_is_listed_with_its_meaning() -> None:
    phony = set(re.findall(r"^\.PHONY: ([\w-]+)", (ROOT / "Makefile").read_text(), re.M))
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1] for line in listed.splitlines()} == phony
    assert all(len(line.split()) > 3 for line in listed.splitlines())


def test_every_command_that_a_page_names_exists() -> None:
    # blocks of "text" quote what the program says
    pages = [re.sub(r"^```text\n.*?^```$", "", page.read_text(), flags=re.M | re.S) for page in PAGES]
    named = {c for page in pages for c in re.findall(r"(?:`|^)npu-gptoss ([a-z]+)", page, re.M)}
    assert named <= set(COMMANDS)
    assert named, "the pages name no command: the pattern is wrong"


def test_the_readmes_request_is_the_one_that_make_serve_prints() -> None:
    printed = example_request("http://127.0.0.1:8000", TINY_NAME, TINY_QUESTION)
    request = next(line for line in SHELL_LINES if line.startswith("curl"))
    assert shlex.split(request)[:-1] == shlex.split(printed)[:-1]
    assert json.loads(shlex.split(request)[-1]) == json.loads(shlex.split(printed)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if NEEDS_CHECKPOINT not in line])
def test_the_commands_of_contributing_run(line: str, tmp_path: Path) -> None:
    words = [str(tmp_path / Path(word).name) if word.startswith("/tmp/") else word for word in shlex.split(line)]
    run = subprocess.run([sys.executable, "-m", "npu_gptoss.cli", *words[1:]], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.slow
def test_the_kernel_of_the_guide_is_found_verified_and_selected(tmp_path: Path) -> None:
    """Steps 2 to 5 of "Add a kernel in five steps", with the import of step 3 done by pytest's -p."""
    (kernel,) = code_blocks(ROOT / "CONTRIBUTING.md", "python")
    (tmp_path / "kernel_of_the_guide.py").write_text(kernel)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    tests = ["tests/moe/test_kernels.py", "-k", "one_sort", "-v", "-p", "no:cacheprovider"]
    verified = python("-m", "pytest", "-p", "kernel_of_the_guide", *tests)
    assert len(re.findall(r"moe\.route\.one_sort.* PASSED", verified)) >= 2, verified
    explained = python("-c", "import kernel_of_the_guide, npu_gptoss.cli as c; c.main(['kernels', 'explain'])")
    assert re.search(r"moe\.route\.one_sort \(priority 8\): selected", explained), explained
