"""Formats, graphs and torch's own operators on the emulated device (emulator/tests/on_device/selftest_cases.py)."""

from __future__ import annotations

import pytest

from emulator.tests import machine

FILE = "selftest_cases.py"
pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_selftest(case: str) -> None:
    machine.check(FILE, case)
