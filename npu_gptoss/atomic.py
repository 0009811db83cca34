"""The one way in which this package writes a file, whole or not at all; and the folder for those of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/npu_gptoss, by default ~/.cache/npu_gptoss. It need not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME", "")
    return (Path(base) if base else (Path(home) if home else Path.home()) / ".cache") / "npu_gptoss"


def write_atomically(path: Path, content: bytes) -> Path:
    """Writes beside the target and renames, so that a reader sees the whole file or none. Creates the directory.

    Raises OSError, as for a full disk; then nothing is left, and an earlier file is what it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
