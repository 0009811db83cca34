"""File access: reads of foreign files with limits, atomic writes, and the cache folder.

The small files of a checkpoint must be regular, of limited size, and plain JSON. A FIFO would block the reader for
ever, a sparse file of 4 GB would fill the memory, a number of 5000 digits or deep nesting stops Python with an
exception. Each is refused with a sentence.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npu_gptoss.errors import InputError, quoted, short

MIB = 1 << 20
# Limits of whole files. The published files of the 120b have 2 KB, 1 KB, 60 KB, 4 KB, 28 MB, 17 KB.
MOST_BYTES = {
    "config.json": 10 * MIB,
    "generation_config.json": 10 * MIB,
    "model.safetensors.index.json": 20 * MIB,
    "tokenizer_config.json": 20 * MIB,
    "tokenizer.json": 500 * MIB,
    "chat_template.jinja": 10 * MIB,
}
MOST_DEPTH = 50  # of nested lists and objects
_MOST_DIGITS = 400  # of a whole number, as many as a float can hold
_AGAIN, _CHECK = "Download it again.", "Check the path and its permissions."
_LFS_POINTER = b"version https://git-lfs"
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class CheckpointError(InputError):
    """A checkpoint that cannot be used: names the tensor or file, the expected and actual value, and the remedy."""


def wrong(where: object, said: str, field: str | None = None) -> CheckpointError:
    """The error of a checkpoint. where: its directory or file. field: by default the file's name."""
    return CheckpointError(f"{where}: {said}", field=field or (where.name if isinstance(where, Path) else None))


def refuse_pointer(path: Path, error: type[InputError] = CheckpointError) -> None:
    """Raises `error` where Git LFS has left a pointer in the file's place."""
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            said = "expected the file, got a Git LFS pointer to it. Run `git lfs pull`, or download it again."
            raise error(f"{path}: {said}", field=path.name)


def reason(error: OSError) -> str:
    """The system's description of the error, without the path."""
    return error.strerror or type(error).__name__


def mode_of(path: Path) -> int:
    """The type and mode; 0 where nothing can be looked up, as within a folder closed to this user, where `Path.exists`
    and `Path.is_file` raise."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def is_there(path: Path, error: type[InputError] = CheckpointError) -> bool:
    """True if a regular file has this name. Raises for anything else of the name, and if it cannot be looked up."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            dead = "expected a file, but it is a link to a file that is not there"
            raise error(f"{path}: {dead}. {_AGAIN}", field=path.name) from None
        return False
    except OSError as problem:
        wrong = f"expected a file, but {reason(problem)}. {_CHECK}"
        raise error(f"{short(str(path), 1000)}: {wrong}", field=path.name) from None
    if not stat.S_ISREG(mode):
        kind = next((words for holds, words in _KINDS if holds(mode)), "no regular file")
        raise error(f"{path}: expected a regular file, but it is {kind}. {_AGAIN}", field=path.name)
    return True


def is_directory(path: Path, error: type[InputError] = CheckpointError) -> bool:
    """True if this is a readable directory."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return False
        next(path.iterdir(), None)
    except FileNotFoundError:
        return False
    except OSError as problem:
        wrong = f"expected a directory, but {reason(problem)}. {_CHECK}"
        raise error(f"{short(str(path), 1000)}: {wrong}", field=path.name) from None
    return True


def read_bytes(path: Path, error: type[InputError] = CheckpointError) -> bytes:
    """A whole file of MOST_BYTES. Raises `error` if it is not regular, not readable or too long."""
    most = MOST_BYTES.get(path.name, 20 * MIB)
    if not is_there(path, error):
        raise error(f"{path}: expected a file, but there is none. {_AGAIN}", field=path.name)
    try:
        with path.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as problem:
        raise error(f"{path}: expected a readable file, but {reason(problem)}. {_CHECK}", field=path.name) from None
    if len(content) > most:
        raise error(f"{path}: expected at most {most >> 20} MiB, got more. {_AGAIN}", field=path.name)
    return content


def read_json(path: Path, error: type[InputError] = CheckpointError) -> Any:
    """The content of a JSON file of MOST_BYTES. Raises `error`, which names the file."""
    content = read_bytes(path, error)
    try:
        return parse_json(content)
    except ValueError as problem:
        remedy = "Correct it, or download it again."
        raise error(f"{path}: expected JSON in UTF-8, but {problem}. {remedy}", field=path.name) from None


def parse_json(content: bytes) -> Any:
    """Parses JSON in UTF-8. Raises ValueError with a reason, also for a name that an object has twice."""
    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats, parse_int=_whole_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise ValueError("its lists and objects are too deep in each other") from None
    _check_depth(values)
    return values


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{quoted(twice)} is there twice in one object")
    return values


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _check_depth(values: Any) -> None:
    level = [values]
    for _ in range(MOST_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise ValueError(f"its lists and objects lie more than {MOST_DEPTH} deep in each other")


def _children(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in inner if isinstance(child, (dict, list)))


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME/npu_gptoss, by default ~/.cache/npu_gptoss. It need not exist."""
    base = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME", "")
    return (Path(base) if base else (Path(home) if home else Path.home()) / ".cache") / "npu_gptoss"


def check_place(path: Path) -> None:
    """Raises InputError if `path` cannot be written. Asked before hours of work; creates nothing."""
    try:
        folder = next((place for place in path.absolute().parents if place.exists()), path)
        fits = not path.is_dir() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:  # a name that is too long, a folder closed to this user
        fits = False
    if not fits:
        raise InputError(f"{path} cannot be written: name a file in a folder of yours")


def write_atomically(path: Path, content: bytes) -> Path:
    """Writes beside the target and renames, so readers see the whole file or none. Creates the directory.

    A link stays one; a device or a pipe is written to, as a file in the place of /dev/null would break the machine.
    Raises OSError, for instance on a full disk; then an earlier file is unchanged, and no other is left.
    """
    if (mode := mode_of(path)) and not stat.S_ISREG(mode):
        path.write_bytes(content)
        return path
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
