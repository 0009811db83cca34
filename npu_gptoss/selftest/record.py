"""What was seen of a CANN on this machine: remembered by its version, because the next one has other kernels.

The doctor writes it when its self-tests have run, a server when it had to go round a defect. Nothing is left out of a
later test because of it: it only tells for which CANN nobody has looked yet.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from npu_gptoss import __version__, cann
from npu_gptoss.files import cache_directory, write_atomically

FILE = "self-tests.json"


def stack(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """In words what results hold for: CANN, driver, torch-npu and this package."""
    toolkit, _ = cann.find_toolkit(environ, root)
    found = cann.toolkit_version(toolkit) if toolkit else ""
    try:
        torch_npu = version("torch-npu")
    except PackageNotFoundError:
        torch_npu = "none"
    device = f"driver {cann.driver_version(root) or 'unknown'}"
    if environ.get("ASCEND_EMULATOR", "") not in ("", "0"):
        device = " with ".join(filter(None, ("the emulated 910B", environ.get("ASCEND_EMULATOR_DEFECTS", ""))))
    return f"CANN {found or 'unknown'} ({device}, torch-npu {torch_npu}, npu-gptoss {__version__})"


@dataclass(frozen=True)
class Seen:
    """tests: the state of each of the doctor's self-tests, empty when they never ran; when: the day of that; way_round:
    what servers had to do to compute rightly, in a sentence; empty when nothing."""

    tests: dict[str, str] = field(default_factory=dict)
    when: str = ""
    way_round: str = ""

    @property
    def wrong(self) -> list[str]:
        return [name for name, state in self.tests.items() if state == "failed"]


@dataclass(frozen=True)
class Record:
    """The file of one machine and user."""

    path: Path

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Record:
        return cls(cache_directory(environ) / FILE)

    def read(self) -> dict[str, Seen]:
        """By `stack`; a file that is missing or is none of ours says nothing."""
        try:
            return {name: Seen(**entry) for name, entry in json.loads(self.path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def remember(self, name: str, **changes: Any) -> str:
        """Changes the entry of a stack; returns why that could not be written, empty when it was."""
        known = self.read()
        known[name] = Seen(**{**vars(known.get(name, Seen())), **changes})
        try:
            write_atomically(self.path, json.dumps({n: vars(s) for n, s in known.items()}, indent=1).encode())
        except OSError as error:
            return error.strerror or str(error)
        return ""


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
