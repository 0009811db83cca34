"""Environment variables that describe the emulated machine to its processes.

`ascend-emulate` sets them (launch.py); the C++ runtime reads the same names (runtime/machine.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "ASCEND_EMULATOR"
OLD_PREFIX = "NPU_GPTOSS_EMULATED"  # from when the emulator was a part of npu-gptoss
VENV_VARIABLE = f"{PREFIX}_VENV"


def with_new_names(variables: Mapping[str, str]) -> dict[str, str]:
    """Replaces old names of our variables by the present ones; if both are set, the present one counts."""
    renamed = {PREFIX + k.removeprefix(OLD_PREFIX): v for k, v in variables.items() if k.startswith(OLD_PREFIX)}
    return renamed | {k: v for k, v in variables.items() if not k.startswith(OLD_PREFIX)}


def text(name: str, default: str = "") -> str:
    """The value of PREFIX_<name>; the default if it is unset or empty."""
    return os.environ.get(f"{PREFIX}_{name}", "") or default


def is_on(name: str, *, default: bool) -> bool:
    return text(name, "1" if default else "0").strip().lower() in ("1", "true", "yes", "on")


def names(name: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text(name).split(",") if part.strip())
