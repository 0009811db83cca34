"""docs/emulator.md names tests and files as evidence: each must be there."""

from __future__ import annotations

import re

import pytest

from tests.evidence import ROOT, objection, spans

PAGE = (ROOT / "docs/emulator.md").read_text(encoding="utf-8")
TRAPS = PAGE.split("## Five traps", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("name", [span for span in spans(PAGE) if re.fullmatch(r"(test|case)_\w+", span)])
def test_each_named_test_exists(name: str) -> None:
    assert objection(name) is None


@pytest.mark.parametrize("name", [span for span in spans(PAGE) if re.fullmatch(r"(tests/)?[\w/]*test_\w+\.py", span)])
def test_each_named_file_exists(name: str) -> None:
    assert objection(name) is None


def test_each_of_the_five_traps_has_tests() -> None:
    rows = [line for line in TRAPS.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    for row in rows:
        assert re.search(r"`(test|case)_", row.rsplit("|", 2)[1]), row
