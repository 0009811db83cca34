"""Instruments a program for traces: each access reports the bytes of its tensors that it reads or writes.

Linalg names each piece of a tensor before it copies or writes it, so a call with the piece as argument goes in front of
that line; `runtime.c` records its addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascend_emulator.compiler.tools import CompilerError

READ, WRITTEN = ACCESSES = ("read", "written")
_POINTER = re.compile(r"(%arg\d+): memref<")
_PIECE = re.compile(r"(%[\w-]+) = memref\.(?:reinterpret_cast|subview|cast) (%[\w-]+)\b")
_ATOMIC = re.compile(r"linalg\.generic .* outs\((%[\w-]+) : (memref<[^()]+>)\).*GenericAtomicRMW")
_USES = (
    (READ, _ATOMIC),
    (WRITTEN, _ATOMIC),
    (READ, re.compile(r"memref\.copy (%[\w-]+), %[\w-]+ : (memref<.+>) to memref<")),
    (READ, re.compile(r"= memref\.load (%[\w-]+)\[(.*)\] : (memref<.+>)$")),
    (READ, re.compile(r"= bufferization\.to_tensor (%[\w-]+)(?: restrict| writable)* : (memref<.+>)$")),
    (WRITTEN, re.compile(r"memref\.copy %[\w-]+, (%[\w-]+) : memref<.+> to (memref<.+>)$")),
    (WRITTEN, re.compile(r"memref\.store %[\w-]+, (%[\w-]+)\[(.*)\] : (memref<.+>)$")),
    (
        WRITTEN,
        re.compile(r"bufferization\.materialize_in_destination %[\w-]+ in writable (%[\w-]+) : .*, (memref<.+>)\) -> "),
    ),
)
_LAYOUT = re.compile(r"memref<(?P<dims>(?:[\d?]+x)*)(?P<element>\w+)(?:, strided<(?P<strides>\[[^]]*\])[^>]*>)?>")


def telling(linalg: str) -> str:
    """Inserts the calls. Raises CompilerError for a line that uses a tensor's memory in an unknown way."""
    head, _, _ = linalg.partition(") attributes")
    pieces, elements, lines = set(_POINTER.findall(head)), set(), []
    for line in linalg.splitlines():
        made = _PIECE.search(line)
        if made:  # an earlier block may have used the name for something else
            (pieces.add if made[2] in pieces else pieces.discard)(made[1])
        elif " func.func " not in line and (used := pieces & set(re.findall(r"%[\w-]+", line))):
            for call, element in _calls(line, used, len(lines)):
                lines.append(call)
                elements.add(element)
        lines.append(line)
    declared = [
        f"  func.func private @kernel_{access}_{element}(memref<*x{element}>)"
        for element in sorted(elements)
        for access in ACCESSES
    ]
    first = next(place for place, line in enumerate(lines) if " func.func " in line)
    return "\n".join([*lines[:first], *declared, *lines[first:]])


def _calls(line: str, used: set[str], number: int) -> Iterator[tuple[str, str]]:
    """The calls in front of a line, each with its element type. used: pieces in it. number: makes names unique."""
    found = [(access, use) for access, pattern in _USES if (use := pattern.search(line)) and use[1] in used]
    if {use[1] for _, use in found} != used:
        raise CompilerError(f"a trace cannot count the bytes of this line, its access is unknown: {line.strip()}")
    for access, use in found:
        name, kind = use[1], use[use.lastindex]
        layout = _LAYOUT.fullmatch(kind)
        if layout is None:
            raise CompilerError(f"a trace cannot count the bytes of this line, {kind} is unknown: {line.strip()}")
        element, rank = layout["element"], layout["dims"].count("x")
        if use.lastindex == 3:  # one element
            ones, strides = ", ".join(["1"] * rank), layout["strides"] or "[1]"
            one = f"memref<{'1x' * rank}{element}, strided<{strides}, offset: ?>>"
            yield f"%told_{number} = memref.subview {name}[{use[2]}] [{ones}] [{ones}] : {kind} to {one}", element
            name, kind = f"%told_{number}", one
        whole = f"%{access}_{number}"
        yield f"{whole} = memref.cast {name} : {kind} to memref<*x{element}>", element
        yield f"func.call @kernel_{access}_{element}({whole}) : (memref<*x{element}>) -> ()", element
