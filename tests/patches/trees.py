"""Copies of an installed package with diffs applied: files where a diff changes them, links where none does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[2] / "patches"


@dataclass(frozen=True)
class Page:
    """The page of a diff: what its front matter says."""

    diff: Path
    release: str  # package and version that the diff applies to
    upstream: str
    retires: tuple[str, ...]  # our workarounds that it makes unnecessary
    retires_part_of: tuple[str, ...]
    body: str

    @property
    def name(self) -> str:
        return self.diff.relative_to(PATCHES).with_suffix("").as_posix()

    @property
    def observation(self) -> str:
        """The function of `observations.py` for it: the diff's name without its number."""
        return self.diff.stem.partition("-")[2].replace("-", "_")


def read_page(path: Path) -> Page:
    match = re.fullmatch(r"---\n(.*?)\n---\n(.*)", path.read_text(), re.S)
    assert match, f"{path} does not begin with front matter"
    fields = dict(line.split(": ", 1) for line in match[1].splitlines() if not line.endswith(":"))

    def names(field: str) -> tuple[str, ...]:
        return tuple(name for name in fields.get(field, "").split(", ") if name)

    return Page(
        path.with_suffix(".diff"),
        fields["release"],
        fields["upstream"],
        names("retires"),
        names("retires part of"),
        match[2],
    )


def pages(package: str | None = None) -> list[Page]:
    return [read_page(path) for path in sorted(PATCHES.glob(f"{package or '*'}/*.md"))]


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
        parents = [parent for parent in Path(file).parents if parent != Path()]
        for parent in reversed(parents):
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
