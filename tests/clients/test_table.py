"""The table of clients on docs/use-it-from.md: of the versions that the locks name, and all yes."""

from __future__ import annotations

from tests.clients import table
from tests.clients.test_clients import PROGRAMS
from tests.markdown import ROOT


def test_the_page_has_other_versions_than_the_locks_or_a_no() -> None:
    page = (ROOT / table.PAGE).read_text(encoding="utf-8")
    for _, title, apis in table.rows():
        assert f"| {title} | {', '.join(apis)} | yes | yes | yes |" in page


def test_a_program_is_in_no_row() -> None:
    assert {program.stem for program in PROGRAMS} == set(table.PYTHON)
