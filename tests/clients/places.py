"""Where the clients' environments are: as scripts/setup/setup_clients.py makes them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/setup"))  # the set-ups run without the package

from setup_clients import YEARS, venv

__all__ = ["YEARS", "venv"]
