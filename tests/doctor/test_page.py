"""docs/doctor.md says what the code says."""

from __future__ import annotations

import json
import re

import pytest

from npu_gptoss.doctor import command, selftest
from npu_gptoss.doctor.checks import CHECKS
from npu_gptoss.doctor.findings import SCHEMA, STATES, as_json, ok
from scripts.docs import doctor_page
from tests.markdown import ROOT

PAGE = ROOT / "docs/doctor.md"


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert text == doctor_page.TABLES.written(text), "python scripts/docs/doctor_page.py --write"


def test_the_page_has_a_row_for_every_check_in_the_order_of_the_report():
    table = PAGE.read_text(encoding="utf-8").partition("## The checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \| \S.* \| \S.* \|$", table, re.M) == list(CHECKS)


def test_a_table_without_its_place_is_an_error():
    with pytest.raises(ValueError, match="one place for window"):
        doctor_page.TABLES.written("no place")


def test_the_page_names_every_state_field_and_option():
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| ([a-z ]+) \| ", text.partition("## The checks")[0], re.M) == ["state", *STATES]
    report = as_json([ok("x")], "0", "cpu")
    section = text.partition("## As JSON")[2]
    for name in (*report, *report["findings"][0]):
        assert f"`{name}`" in section, name
    assert f"`schema` is {SCHEMA}" in section
    from tests.doctor.test_command import options

    for name, value in vars(options()).items():
        if name not in ("json", "model"):
            assert f"--{name.replace('_', '-')} " in text
            assert str(value) in text or value in (1, None), f"the default of {name}"


def test_the_limit_that_the_page_names_is_the_one_in_force():
    assert set(selftest.LIMITS.values()) == {0.02, 1e-4}
    assert json.dumps(command.__doc__).count("Takes a minute") == 1
