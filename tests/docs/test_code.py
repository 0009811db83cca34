"""Blocks of Python and JSON in the pages: each Python block is run here or by the test named here; JSON is JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.docs.shell import Block, blocks
from tests.evidence import objection
from tests.markdown import PAGES, ROOT

ELSEWHERE = {
    "CONTRIBUTING.md": "tests/test_readme.py::test_the_kernel_of_the_guide_is_found_verified_and_selected",
    "docs/add-a-kernel.md": "tests/third_party/test_paged_attention_example.py::"
    "test_the_page_shows_the_package_and_no_other_code",
    "docs/serving-on-cpu.md": "tests/serving/test_openai_api.py::test_the_request_and_the_client_of_the_pages_work",
}


def of(language: str) -> list[tuple[str, Block]]:
    """(page, block) of all blocks of a language."""
    return [
        (path.relative_to(ROOT).as_posix(), block)
        for path in PAGES
        for block in blocks(path.read_text(encoding="utf-8"))
        if block.language == language
    ]


PYTHON, JSON = of("python"), of("json")


def test_tests_of_the_other_blocks_exist_and_each_page_has_one_block() -> None:
    assert {name: wrong for name in ELSEWHERE.values() if (wrong := objection(name))} == {}
    pages = [page for page, _ in PYTHON]
    assert {page: pages.count(page) for page in ELSEWHERE} == dict.fromkeys(ELSEWHERE, 1)


HERE = [pytest.param(block, id=f"{page}:{block.first}") for page, block in PYTHON if page not in ELSEWHERE]


@pytest.mark.parametrize("block", HERE)
def test_a_block_of_python_runs(block: Block) -> None:
    run = subprocess.run([sys.executable, "-c", "\n".join(block.lines)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("block", [pytest.param(block, id=f"{page}:{block.first}") for page, block in JSON])
def test_a_block_of_json_is_json(block: Block) -> None:
    assert json.loads("\n".join(block.lines))


def test_blocks_are_found() -> None:
    assert len(HERE) >= 1
    assert len(JSON) >= 3
