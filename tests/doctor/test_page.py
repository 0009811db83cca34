"""docs/doctor.md has every check, state, field and option."""

from __future__ import annotations

import re

from npu_gptoss.doctor.checks import CHECKS
from npu_gptoss.doctor.findings import SCHEMA, STATES, as_json, ok
from tests.markdown import ROOT

PAGE = ROOT / "docs/doctor.md"


def test_page_has_a_row_for_every_check_in_order():
    table = PAGE.read_text(encoding="utf-8").partition("## The checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| \S.* \| \S.* \|$", table, re.M) == list(CHECKS)


def test_page_names_every_state_field_and_option():
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| ([a-z ]+) \| ", text.partition("## The checks")[0], re.M) == ["state", *STATES]
    report = as_json([ok("x")], "0", "cpu")
    section = text.partition("## As JSON")[2]
    for name in (*report, *report["findings"][0]):
        assert f"`{name}`" in section, name
    assert f"`schema` is {SCHEMA}" in section
    from tests.doctor.test_command import options

    for name, value in vars(options()).items():
        if name not in ("json", "model", "brief"):
            assert f"--{name.replace('_', '-')} " in text
            assert str(value) in text or value in (1, None), f"the default of {name}"
