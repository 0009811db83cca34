"""Where the environments are: as scripts/setup/environments.py makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.setup.environments import CLIENTS, ENVIRONMENTS, ROOT
from tests.serving.openai.conftest import python_of

YEARS = tuple(CLIENTS)
TODAY = YEARS[-1]


def venv(year: str) -> Path:
    return ROOT / ENVIRONMENTS[f"clients-{year}"].folder


def set_up(release: str) -> None:
    """Fails the test where the environment of a release of vLLM is not there."""
    python, _ = python_of(release)
    if not python.exists():
        pytest.fail(f"{python.parents[1].name} is not set up; run: make test-clients")
