"""docs/emulator.md names tests and files as evidence: each must be there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/emulator.md").read_text()
TRAPS = PAGE.split("## Five traps", 1)[1].split("\n## ", 1)[0]


@cache
def functions() -> frozenset[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    return frozenset(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:test|case)_\w+)`", PAGE))))
def test_each_named_test_exists(name):
    assert name in functions()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", PAGE))))
def test_each_named_file_exists(name):
    assert list((ROOT / "tests").rglob(name.removeprefix("tests/"))), name


def test_each_of_the_five_traps_has_tests():
    rows = [line for line in TRAPS.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    for row in rows:
        assert re.search(r"`(test|case)_", row.rsplit("|", 2)[1]), row
