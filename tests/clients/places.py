"""Where the clients' environments are: as scripts/setup/environments.py makes them."""

from __future__ import annotations

from pathlib import Path

from scripts.setup.environments import CLIENTS, ENVIRONMENTS
from scripts.setup.machine import ROOT

YEARS = tuple(CLIENTS)


def venv(year: str) -> Path:
    return ROOT / ENVIRONMENTS[f"clients-{year}"].folder
