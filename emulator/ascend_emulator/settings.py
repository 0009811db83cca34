"""The environment variables that describe the emulated machine to every process that runs on it.

`ascend-emulate` sets them (launch.py); the C++ runtime reads them by the same names (runtime/machine.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "ASCEND_EMULATOR"
OLD_PREFIX = "NPU_GPTOSS_EMULATED"  # of when it was a part of npu-gptoss
VENV_VARIABLE = f"{PREFIX}_VENV"


def with_new_names(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the old names of ours replaced by those of today; where both are set, today's counts."""
    renamed = {PREFIX + k.removeprefix(OLD_PREFIX): v for k, v in variables.items() if k.startswith(OLD_PREFIX)}
    return renamed | {k: v for k, v in variables.items() if not k.startswith(OLD_PREFIX)}


def text(name: str, default: str = "") -> str:
    """The value of PREFIX_<name>, the default where it is unset or empty."""
    return os.environ.get(f"{PREFIX}_{name}", "") or default


def is_on(name: str, *, default: bool) -> bool:
    return text(name, "1" if default else "0").strip().lower() in ("1", "true", "yes", "on")


def names(name: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text(name).split(",") if part.strip())
