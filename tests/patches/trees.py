"""Copies of an installed package with diffs applied: files where a diff changes them, links where none does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "patches"
ASCEND = sorted(PATCHES.glob("vllm-ascend-0.11.0/*.diff"))


def changed_files(diff: Path) -> list[str]:
    """The files that a diff changes; it creates, renames and deletes none."""
    text = diff.read_text()
    old, new = re.findall(r"^--- a/(.+)$", text, re.M), re.findall(r"^\+\+\+ b/(.+)$", text, re.M)
    assert old == new
    assert new
    return new


def _own_folder(folder: Path, original: Path) -> None:
    """Make `folder` a folder of its own, with links to what lies in the original."""
    if folder.is_symlink():
        folder.unlink()
    if folder.is_dir():
        return
    folder.mkdir()
    for entry in original.iterdir():
        if entry.name == "__pycache__":  # its modules would all be compiled again
            shutil.copytree(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry)


def copy_for(diffs: Sequence[Path], site: Path, folder: Path) -> None:
    """In `folder`, the packages of `site` that the diffs change, each changed file as a copy."""
    folder.mkdir()
    for file in sorted({file for diff in diffs for file in changed_files(diff)}):
        for parent in reversed([parent for parent in Path(file).parents if parent != Path()]):
            _own_folder(folder / parent, site / parent)
        (folder / file).unlink()
        shutil.copyfile(site / file, folder / file)


def apply(diff: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply`, which is strict: no fuzz. (Two files of vllm-ascend have lines that end in CR LF.)"""
    return subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, str(diff)],
        cwd=folder,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
    )
