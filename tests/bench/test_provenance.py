from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from npu_gptoss.bench import provenance


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository around the package; no other folder has a commit."""
    (tmp_path / "npu_gptoss").mkdir()
    (tmp_path / "npu_gptoss" / "code.py").write_text("1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "npu_gptoss")
    monkeypatch.delenv("NPU_GPTOSS_COMMIT", raising=False)
    return tmp_path


def test_a_checkout_names_its_commit_and_says_when_files_differ_from_it(checkout: Path) -> None:
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert provenance.commit() == head
    (checkout / "notes.txt").write_text("not tracked")
    assert provenance.commit() == head
    (checkout / "npu_gptoss" / "code.py").write_text("2\n")
    assert provenance.commit() == f"{head}-dirty"


def test_copy_without_git_takes_the_commit_of_the_variable(checkout, tmp_path, monkeypatch) -> None:
    """An installed package must not take the commit of a repository around it."""
    inner = tmp_path / "site-packages" / "npu_gptoss"
    inner.mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", inner)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("NPU_GPTOSS_COMMIT", "1234abcd")
    assert provenance.commit() == "1234abcd"


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.159.04; echo 580.159.04", "580.159.04"), ("exit 9", "unknown"), (None, "unknown")],
)
def test_the_driver_is_nvidia_smis_word_and_never_an_error(script, version, tmp_path, monkeypatch) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.driver() == version
