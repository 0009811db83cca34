"""Copies of an installed package with diffs applied."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "patches"
ASCEND = sorted(PATCHES.glob("vllm-ascend-0.11.0/*.diff"))


def changed_file(diff: Path) -> str:
    """The first file that a diff changes."""
    return re.search(r"^\+\+\+ b/(.+)$", diff.read_text(), re.M)[1]


def copied(site: Path, folder: Path, *diffs: Path, fuzzy: bool = False) -> Path:
    """`folder` with vllm_ascend of `site` and the diffs. Alone, a diff fits exactly; several share their context."""
    shutil.copytree(site / "vllm_ascend", folder / "vllm_ascend", ignore=shutil.ignore_patterns("*.so"))
    for library in (site / "vllm_ascend").rglob("*.so"):
        (folder / library.relative_to(site)).symlink_to(library)
    for diff in diffs:
        done = apply(diff, folder, *(["-C1"] if fuzzy else []))
        assert done.returncode == 0, done.stderr
    return folder


def apply(diff: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply`, which is strict: no fuzz. (Two files of vllm-ascend have lines that end in CR LF.)"""
    command = ["git", "apply", "--whitespace=nowarn", *options, str(diff)]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
