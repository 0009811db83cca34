"""The environment of `make docs`: a lock with the hash of every file that may be installed; a set-up that obeys it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import lock_docs
from scripts.setup_venv import read_pins
from tests.docker.test_requirements import read
from tests.scripts.shell import ROOT

SCRIPT = ROOT / "scripts/setup_docs.py"
LOCK = ROOT / "requirements/docs.txt"
PYTHON = ROOT / ".venv-docs/bin/python"
A, B = "a" * 64, "b" * 64


def test_every_version_is_exact_and_has_a_hash_for_each_file() -> None:
    entries = {name: (version, hashes) for name, version, _, hashes in read(LOCK)}
    assert {name: version for name, (version, _) in entries.items()} == read_pins(LOCK)
    assert {f"{name}=={entries[name][0]}" for name in ("mkdocs", "mkdocs-material")} == set(lock_docs.WANTED)
    assert len(entries["mkdocs"][1]) == 1, "one wheel for every machine"
    assert len(entries["markupsafe"][1]) == 6, "a compiled one for three Pythons on two machines"


@pytest.mark.docs
@pytest.mark.skipif(not PYTHON.exists(), reason="MkDocs is not set up; make docs")
def test_nothing_is_missing_and_versions_fit() -> None:
    """The lock is installed without a resolver, so pip has to be asked whether it is complete."""
    done = subprocess.run([str(PYTHON), "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run(venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--venv", str(venv)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_a_folder_that_it_did_not_make_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = run(tmp_path)
    assert done.returncode == 1
    assert "was not made by this set-up" in done.stderr
    assert (tmp_path / "mine").exists()


@pytest.mark.slow
def test_without_the_wheels_it_fails_with_the_reason(tmp_path: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    done = run(tmp_path / "venv", **variables)
    assert done.returncode == 1, done.stdout
    assert "No matching distribution found for mkdocs" in done.stderr
    assert "what is finished is not done twice" in done.stderr


def test_the_lock_has_the_hashes_of_all_pythons_and_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def resolve(python: str, machine: str, *requirements: str) -> dict[str, tuple[str, str]]:
        asked.append((python, machine, *requirements))
        return {"pure": ("1.0", A), "built": ("2.0", A if machine == "x86_64" else B)}

    monkeypatch.setattr(lock_docs, "resolve", resolve)
    text = lock_docs.render()
    assert asked[0] == ("3.10", "x86_64", *lock_docs.WANTED), "the oldest Python resolves"
    assert set(asked[1:]) == {
        (python, machine, "--no-deps", "pure==1.0", "built==2.0")
        for python in ("3.10", "3.11", "3.12")
        for machine in ("x86_64", "aarch64")
    }
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        "built==2.0 \\",
        f"    --hash=sha256:{A} \\",
        f"    --hash=sha256:{B}",
        "pure==1.0 \\",
        f"    --hash=sha256:{A}",
    ]


def test_a_version_that_the_index_lacks_is_an_error_with_pips_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        lock_docs.LockError, match=r"docs on Python 3\.10, aarch64 cannot be resolved\. pip says:\n(.*\n)*.*mkdocs"
    ):
        lock_docs.resolve("3.10", "aarch64", "mkdocs==1.6.1")


def test_a_file_with_another_hash_is_not_installed() -> None:
    """The set-up asks pip for hashes; without the flag a line of another file would lift the check."""
    source = SCRIPT.read_text(encoding="utf-8")
    (install,) = re.findall(r"run\.attempt\(pip\(env, (.+?), \"-r\"", source)
    assert "--require-hashes" in install
