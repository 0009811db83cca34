"""Stores self-test results for each CANN release on this machine, so that a server can report them at its start.

The doctor writes them after its self-tests. They leave out no later test: they only show which CANN was never tested.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from npu_gptoss import __version__, cann
from npu_gptoss.files import cache_directory, write_atomically

FILE = "self-tests.json"


def stack(card: str, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """The stack that results hold for, in words: CANN, the card by its driver's name, torch-npu and this package."""
    toolkit, _ = cann.find_toolkit(environ, root)
    found = cann.toolkit_version(toolkit) if toolkit else ""
    try:
        torch_npu = version("torch-npu")
    except PackageNotFoundError:
        torch_npu = "none"
    device = f"{card}, driver {cann.driver_version(root) or 'unknown'}"
    if environ.get("ASCEND_EMULATOR", "") not in ("", "0"):
        device = " with ".join(filter(None, (f"an emulated {card}", environ.get("ASCEND_EMULATOR_DEFECTS", ""))))
    return f"CANN {found or 'unknown'} ({device}, torch-npu {torch_npu}, npu-gptoss {__version__})"


@dataclass(frozen=True)
class Seen:
    """tests: the state of each self-test of the doctor. when: the day."""

    tests: dict[str, str]
    when: str

    @property
    def wrong(self) -> list[str]:
        return [name for name, state in self.tests.items() if state == "failed"]


def file(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the record's file of one machine and user."""
    return cache_directory(environ) / FILE


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Seen]:
    """The entries by `stack`; none where the file is missing or has another form."""
    try:
        entries = json.loads(file(environ).read_text()).items()
        return {name: Seen(dict(entry["tests"].items()), str(entry["when"])) for name, entry in entries}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def remember(name: str, tests: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str:
    """Writes today's results of a stack. Returns why that could not be done, empty when it was."""
    entries = {**read(environ), name: Seen(dict(tests), time.strftime("%Y-%m-%d", time.gmtime()))}
    try:
        write_atomically(file(environ), json.dumps({n: vars(s) for n, s in entries.items()}, indent=1).encode())
    except OSError as error:
        return error.strerror or str(error)
    return ""
