"""The clients' environments: exact locks of both years, in Python and in JavaScript, and no host of a registry."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from scripts.setup.setup_venv import read_pins
from tests.clients.places import YEARS, venv
from tests.scripts.shell import ROOT

CLIENTS = ("openai", "openai-agents", "langchain-openai", "pydantic-ai-slim", "litellm", "instructor")
# beyond what a package asks for, as the lock says: (what is asked too little, by whom)
BEYOND = {("openai", "litellm"), ("jiter", "instructor")}


def lock(year: str) -> str:
    return (ROOT / f"requirements/clients-{year}.txt").read_text()


@pytest.mark.parametrize("year", YEARS)
def test_every_version_is_exact_and_listed_once(year: str) -> None:
    lines = [line for line in lock(year).splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(read_pins(ROOT / f"requirements/clients-{year}.txt")) == len(lines)


def test_the_years_have_the_same_clients_in_other_versions() -> None:
    pins = [read_pins(ROOT / f"requirements/clients-{year}.txt") for year in YEARS]
    for client in CLIENTS:
        old, new = (pin[client] for pin in pins)
        assert old != new, client


@pytest.mark.parametrize("year", YEARS)
def test_javascript_s_lock_is_of_its_list_and_names_no_host(year: str) -> None:
    folder = ROOT / "tests/clients/js" / year
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    packages = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert packages[""]["dependencies"] == wanted
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert not [name for name, package in packages.items() if name and not package.get("integrity")]


@pytest.mark.clients
@pytest.mark.parametrize("year", YEARS)
def test_nothing_is_missing_and_versions_fit_but_where_the_lock_says_so(year: str) -> None:
    """The lock is installed without a resolver, so pip has to be asked whether it is complete."""
    command = [str(venv(year) / "bin/python"), "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\S+) \S+ has requirement (\w+)", done.stdout, re.M)
    wrong = {(asked, by) for by, asked in found}
    assert wrong <= BEYOND, done.stdout
    assert "not installed" not in done.stdout
