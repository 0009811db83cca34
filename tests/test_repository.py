"""Texts and files that must not be in the tree: paths of a developer's machine, hosts of package registries, binaries.

The patterns are assembled here, so that this file does not match them itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# the trained tiny model: only the vocabulary rows in use, made by research/train_tiny.py
WEIGHTS, WEIGHTS_LIMIT = "npu_gptoss/assets/", 3_000_000
TEXT_LIMIT = 400_000
REGISTRIES = (("py" + "pi", "org"), ("python" + "hosted", "org"), ("npm" + "js", "org"), ("deb" + "ian", "org"))
# folders that exist everywhere: a path below them identifies no machine
COMMON_FOLDERS = {
    Path("/"),
    Path("/home"),
    Path("/root"),
    Path("/usr"),
    Path("/opt"),
    Path("/mnt"),
    Path("/var"),
    Path("/src"),
}


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to the tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def machine_paths() -> set[str]:
    """This checkout, its parent, the home folder and the interpreter's environment, unless they exist everywhere."""
    folders = {ROOT, ROOT.parent, Path.home(), Path(sys.prefix)}
    return {str(folder) for folder in folders - COMMON_FOLDERS - {Path(tempfile.gettempdir()), Path("/usr/local")}}


def find(pattern: re.Pattern[str]) -> list[str]:
    hits = []
    for path in tracked_files():
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
        hits += [
            f"{path.relative_to(ROOT)}:{n}: {line[:120]}" for n, line in enumerate(lines, 1) if pattern.search(line)
        ]
    return hits


def pattern_of_paths(paths: set[str]) -> re.Pattern[str]:
    return re.compile(r"(?<![\w.~-])(" + "|".join(map(re.escape, sorted(paths))) + r")(/|\b)")


def pattern_of_registries() -> re.Pattern[str]:
    return re.compile("|".join(rf"{name}\.{domain}" for name, domain in REGISTRIES))


def test_no_path_of_this_machine_is_in_the_tree() -> None:
    assert find(pattern_of_paths(machine_paths())) == []


def test_no_registry_host_is_in_the_tree() -> None:
    assert find(pattern_of_registries()) == []


def test_no_binary_and_no_large_file_is_in_the_tree() -> None:
    bad = []
    for path in tracked_files():
        name, size = path.relative_to(ROOT).as_posix(), path.stat().st_size
        if name.startswith(WEIGHTS):
            if size > WEIGHTS_LIMIT:
                bad.append(f"{name}: {size} bytes, the limit is {WEIGHTS_LIMIT}")
        elif b"\0" in path.read_bytes():
            bad.append(f"{name}: binary")
        elif size > TEXT_LIMIT:
            bad.append(f"{name}: {size} bytes, the limit is {TEXT_LIMIT}")
    assert bad == []
