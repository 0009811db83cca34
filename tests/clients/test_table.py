"""The table of clients on docs/use-it-from.md: of the versions that the locks name, and all yes."""

from __future__ import annotations

from pathlib import Path

from tests.clients import table
from tests.clients.test_clients import PROGRAMS
from tests.markdown import ROOT

JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="client" value="codex"/><property name="release" value="0.11"/>
</properties></testcase>
<testcase name="b"><properties><property name="client" value="codex"/><property name="release" value="0.33"/>
</properties><failure/></testcase>
<testcase name="c"><properties><property name="client" value="codex"/><property name="release" value="0.33"/>
</properties></testcase>
<testcase name="d"><properties><property name="client" value="codex"/><property name="release" value="0.23"/>
</properties><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_failed_or_skipped_client_counts_as_one_that_works(tmp_path: Path) -> None:
    (tmp_path / "clients.xml").write_text(JUNIT)
    results = table.read(tmp_path / "clients.xml")
    assert [table.cell(results.get(("codex", release), ())) for release in table.RELEASES] == [
        "yes",
        "not run",
        "1 of 2",
    ]


def test_the_page_has_other_versions_than_the_locks_or_a_no() -> None:
    page = (ROOT / table.PAGE).read_text(encoding="utf-8")
    for _, title, apis in table.rows():
        assert f"| {title} | {', '.join(apis)} | yes | yes | yes |" in page


def test_a_program_is_in_no_row() -> None:
    assert {program.stem for program in PROGRAMS} == set(table.PYTHON)
