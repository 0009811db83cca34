"""docs/doctor.md has every check, state, field and option; all pages quote the doctor as it prints."""

from __future__ import annotations

import re

import pytest
import torch

from npu_gptoss.doctor.checks import CHECKS
from npu_gptoss.doctor.findings import SCHEMA, STATES, as_json, ok
from npu_gptoss.doctor.selftest import PREFIX, self_test
from npu_gptoss.kernels import platform_override
from tests.doctor.machines import in_words
from tests.markdown import PAGES, ROOT, blocks, name_of

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


QUOTED = [
    (name_of(page), line.strip())
    for page in PAGES
    for block in blocks(page)
    for line in block.text.splitlines()
    if re.match(r"\s*(ok|failed|warning)\s+self-test-[a-z]+: ", line) or (" ok, " in line and " not applicable" in line)
]


@pytest.mark.parametrize(("page", "line"), QUOTED, ids=[f"{page}:{line[:40]}" for page, line in QUOTED])
def test_pages_quote_the_doctor_as_it_prints(page: str, line: str):
    """… stands for a number; numbers of findings are never typed, because each new check changes them."""
    if " not applicable" in line:
        assert re.fullmatch(r"… ok, 0 warnings, 0 failures, … not applicable", line)
        return
    check = line.split()[1].rstrip(":")
    assert check.startswith(PREFIX)
    with platform_override("cpu", frozenset()):
        found = list(self_test(check, torch.device("cpu")))
    printed = " ".join(in_words([ok(f.sentence, check=check) for f in found], {"": [check]}).split())
    pattern = ".*?".join(re.escape(part) for part in " ".join(line.split()).split("…"))
    assert re.search(pattern, printed), printed


def test_pages_with_the_doctor_are_found():
    assert {page for page, _ in QUOTED} >= {
        "docs/tutorials/gpt-oss-20b-on-one-910b.md",
        "docs/tutorials/without-an-accelerator.md",
    }
