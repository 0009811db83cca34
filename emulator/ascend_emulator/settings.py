"""Environment variables that describe the emulated machine to its processes.

`ascend-emulate` sets them (launch.py); the C++ runtime reads the same names (runtime/machine.cpp).
"""

from __future__ import annotations

import os

PREFIX = "ASCEND_EMULATOR"
VENV_VARIABLE = f"{PREFIX}_VENV"


def text(name: str, default: str = "") -> str:
    """The value of PREFIX_<name>; the default if it is unset or empty."""
    return os.environ.get(f"{PREFIX}_{name}", "") or default


def is_on(name: str, *, default: bool) -> bool:
    return text(name, "1" if default else "0").strip().lower() in ("1", "true", "yes", "on")


def names(name: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text(name).split(",") if part.strip())
