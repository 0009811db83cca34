"""The environment of `make docs`: a lock with the hash of every file that may be installed; a set-up that obeys it."""

from __future__ import annotations

import subprocess

import pytest

from scripts.setup import lock_docs
from scripts.setup.setup_venv import read_pins
from tests.docker.test_requirements import read
from tests.scripts.shell import ROOT

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
