"""docs/reliability.md: the tests that it names are there, and its table is that of the records."""

from __future__ import annotations

from pathlib import Path

from scripts.docs import soak_page
from tests.evidence import ROOT, objections
from tests.soak import report
from tests.soak.server import Stack
from tests.soak.test_soak import record

PAGE = ROOT / soak_page.PAGE


def test_every_fault_has_a_test_that_is_there() -> None:
    faults = PAGE.read_text(encoding="utf-8").split("## Faults")[1]
    rows = [line.rsplit("|", 2)[1] for line in faults.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    assert [row for row in rows if "tests/" not in row] == []
    assert {span: wrong for row in rows for span, wrong in objections(row).items()} == {}


def test_the_table_is_that_of_the_records() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert soak_page.TABLES.written(text) == text, "out of date: python scripts/docs/soak_page.py --write"


def test_runs_of_one_kind_are_added_up(tmp_path: Path) -> None:
    for seed in (1, 2):
        report.save(record(seed=seed, stack=str(Stack("emulated", "full"))), tmp_path)
    assert "| emulated, full, fcfs | 2 | 6 | 2 of 2 |" in soak_page.soaked(tmp_path)
    assert "No full run" in soak_page.soaked(tmp_path / "empty")
