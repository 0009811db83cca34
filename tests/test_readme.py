"""The README and CONTRIBUTING promise nothing that is not there: pictures and targets; the guide's kernel is selected.

Their commands run in tests/docs; the client of docs/serving-on-cpu.md in tests/serving/test_openai_api.py.
"""

from __future__ import annotations

import importlib
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
from tests.markdown import PAGES, ROOT, code_blocks

README = ROOT / "README.md"
SHELL_LINES = [line for block in code_blocks(README, "sh") for line in block.splitlines()]
PACKAGE = ROOT / "npu_gptoss"
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
FAMILIES = ("attention", "moe", "dense")


def tree() -> tuple[set[str], set[str]]:
    """What CONTRIBUTING's tree has: in the package, and in the repository."""
    block = next(block for block in code_blocks(ROOT / "CONTRIBUTING.md", "") if block.startswith("npu_gptoss/"))
    inside, outside = set(), set()
    for line in block.splitlines():
        names = [word for word in re.split(r"\s{2,}", line.strip()) if word]
        places = [word for word in names if re.fullmatch(r"[\w./]+", word)]
        assert places, f"no place in the line {line!r}"
        (inside if line.startswith("  ") else outside).update(place.rstrip("/") for place in places)
    return inside, outside


def test_the_tree_has_every_place_and_no_other() -> None:
    inside, outside = tree()
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert inside == FOLDERS | files | {"assets"}
    assert {place for place in outside if not (ROOT / place).is_dir()} == set()
    shown = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    folders = {name.partition("/")[0] for name in shown if "/" in name and not name.startswith(".")}
    assert folders <= outside, "a folder of the repository that the tree lacks"


def picture_objections(picture: str) -> list[str]:
    """What of the README's picture is not there, and what is there and not in it."""
    named = set(re.findall(r"\b([a-z_]+)/", picture))
    wrong = [f"there is no folder npu_gptoss/{name}" for name in sorted(named - FOLDERS)]
    wrong += [f"the picture lacks npu_gptoss/{name}" for name in sorted(FOLDERS - named)]
    (spine,) = re.findall(r"^kernels/ +((?:\w+ · )+\w+)", picture, re.M)
    wrong += [f"there is no kernels/{n}.py" for n in spine.split(" · ") if not (PACKAGE / f"kernels/{n}.py").is_file()]
    solutions = re.findall(r"(\w+) \(", picture[picture.index("solutions") :])
    for name in solutions:
        places = [PACKAGE / family / place for family in FAMILIES for place in (name, f"{name}.py")]
        wrong += [] if any(place.exists() for place in places) else [f"there is no solution {name}"]
    module, function = re.findall(r"(npu_gptoss\.\w+)\.(\w+)\(\)", picture)[0]
    wrong += [] if hasattr(importlib.import_module(module), function) else [f"there is no {module}.{function}"]
    return wrong if len(solutions) == 4 else [*wrong, f"four solutions, got {solutions}"]


PICTURE = next(block for block in code_blocks(README, "") if block.startswith("HTTP"))


def test_the_site_begins_with_the_same_picture() -> None:
    assert PICTURE in code_blocks(ROOT / "docs/index.md", "")


def test_every_folder_of_the_package_is_in_the_picture_and_every_name_of_it_is_there() -> None:
    assert picture_objections(PICTURE) == []


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("serving/", "server/", "there is no folder npu_gptoss/server"),
        ("serving/", "server/", "the picture lacks npu_gptoss/serving"),
        ("registry", "registrar", "there is no kernels/registrar.py"),
        ("small_ops (", "little_ops (", "there is no solution little_ops"),
        ("plugin.register()", "plugin.enrol()", "there is no npu_gptoss.plugin.enrol"),
    ],
)
def test_a_name_of_the_picture_that_moved_is_told(old: str, new: str, wrong: str) -> None:
    assert PICTURE.count(old) >= 1
    assert wrong in picture_objections(PICTURE.replace(old, new))


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
