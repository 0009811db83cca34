"""One thread per process. A named environment must exist, so that no test skips without it."""

from __future__ import annotations

import os

import pytest
from ascend_emulator.launch import EmulationError, find_venv
from ascend_emulator.settings import VENV_VARIABLE

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in (
        ("emulated", "needs the environment with torch_npu"),
        ("slow", "takes more than ten seconds"),
        ("long", "what a shorter test shows too"),
    ):
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if os.environ.get(VENV_VARIABLE):
        try:
            find_venv()
        except EmulationError as error:
            raise pytest.UsageError(str(error)) from None
