"""Reads from a shared library the names that it needs, defines and leaves undefined.

The emulator makes the libraries of CANN (and, for torch's CUDA wheel, of CUDA) that this machine lacks. It reads their
exports from the installed wheels, so other releases need no change here. 64-bit little-endian files only (x86_64,
aarch64), with `struct` alone: torch's libraries hold half a million symbols, and a general ELF package takes minutes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Undefined:
    """A symbol that another library must define. `version` and `provider` are set for versioned symbols."""

    name: str
    weak: bool
    provider: str = ""
    version: str = ""


@dataclass(frozen=True)
class Library:
    """One ELF file: its soname, the sonames it needs, and its dynamic symbols."""

    path: Path
    soname: str
    needed: tuple[str, ...]
    undefined: tuple[Undefined, ...] = field(repr=False)
    defined: frozenset[str] = field(repr=False)


# section types and dynamic tags (System V ABI, chapter 4 and 5; LSB for the GNU versions)
_DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED, _DT_SONAME = 1, 14
_LOCAL, _WEAK = 0, 2


class _File:
    """Sections of one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        self.data = data
        offset, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]

    def section(self, kind: int) -> tuple[bytes, int]:
        """Content of the first section of this type, and the index of its linked section; empty without one."""
        for header in self.sections:
            if header[1] == kind:
                return self.content(header), header[6]
        return b"", 0

    def content(self, header: tuple[int, ...]) -> bytes:
        return self.data[header[4] : header[4] + header[5]]

    def strings(self, index: int) -> bytes:
        return self.content(self.sections[index])


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()


def _versions(file: _File) -> dict[int, tuple[str, str]]:
    """Index in .gnu.version -> (soname, version) that the file requires."""
    data, link = file.section(_VERNEED)
    found: dict[int, tuple[str, str]] = {}
    if not data:
        return found
    strings, position = file.strings(link), 0
    while True:
        _, count, library, first, following = struct.unpack_from("<HHIII", data, position)
        entry = position + first
        for _ in range(count):
            _, _, index, name, step = struct.unpack_from("<IHHII", data, entry)
            found[index] = (_text(strings, library), _text(strings, name))
            entry += step
        if not following:
            return found
        position += following


@cache
def read(path: Path) -> Library:
    """The dynamic section and symbols of `path`. Raises ValueError if it is not a shared library."""
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        file = _File(path, data)
        dynamic, link = file.section(_DYNAMIC)
        symbols, names = file.section(_DYNSYM)
        if not dynamic or not symbols:
            raise ValueError(f"{path} has no dynamic section: expected a shared library")
        strings = file.strings(link)
        tags = list(struct.iter_unpack("<QQ", dynamic))
        needed = tuple(_text(strings, value) for tag, value in tags if tag == _DT_NEEDED)
        soname = next((_text(strings, value) for tag, value in tags if tag == _DT_SONAME), path.name)
        versions, numbers = _versions(file), file.section(_VERSYM)[0]
        strings = file.strings(names)
        undefined, defined = [], set()
        # name, info, other, section index, value, size
        for index, (name, info, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
            if not name or info >> 4 == _LOCAL:
                continue
            if section:
                defined.add(_text(strings, name))
                continue
            number = struct.unpack_from("<H", numbers, 2 * index)[0] & 0x7FFF if numbers else 0
            undefined.append(Undefined(_text(strings, name), info >> 4 == _WEAK, *versions.get(number, ("", ""))))
    return Library(path, soname, needed, tuple(undefined), frozenset(defined))
