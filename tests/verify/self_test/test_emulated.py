"""Self-tests of formats, graphs and torch's own operators on the emulated device (on_device_cases.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.tests import machine

FILE = Path(__file__).with_name("on_device_cases.py")
pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_selftest(case: str) -> None:
    machine.check(FILE, case)
