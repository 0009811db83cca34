"""The PTX of the kernels that open packed weights, compiled without a GPU; one of each format to machine code too.

Opened are pairs: the instructions take the third codes of words 2i and 2i + 1 from one register (`layout.mxfp4_words`).
Triton packs values that lie side by side in a thread; if it ever dealt words out singly, weights would be wrong without
an error. And a register that the tensor cores still read is not written: they run in parallel with later instructions
until `wgmma.wait_group`, and Triton lets a product run on into the loop's next step, where its weights are opened anew.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = 227 << 10  # bytes, of a program on Hopper
PAIR_OPENED = re.compile(r"\s*and\.b32 a, (%r\d+), 0x81C081C0")
# a whole register straight from memory, or the zeros of a tile that is not there
WHOLE = re.compile(r"(@!?%p\d+ )?(ld\.shared(\.v\d)?\.b32|ldmatrix\.|ld\.global(\.\w+)*\.b32|mov\.b32\s+%r\d+, 0;)")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from npu_gptoss.moe.triton import few, launches, many
from npu_gptoss.moe.triton.layout import TiledMatrix
from npu_gptoss.moe.triton.tuned import POINTS, tiles as tiles_of

types = {
    "words": "*u16", "bias": "*bf16", "inner": "*bf16", "limit": "fp32", "x": "*bf16", "out": "*bf16",
    "shares": "*fp32", "topk_weights": "*fp32", "topk_ids": "*i64", "expert_map": "*i32", "lists": "*i32",
    "counts": "*i32", "slots": "i32", "order": "*i32", "ends": "*i32",
    "adapter": "*i32", "a": "*bf16", "b": "*bf16", "low": "*fp32",
}

to_machine_code = CUDABackend.make_cubin  # ptxas takes ten times as long as all before it

def compiled(name, kernel, warps, scales, constants):
    CUDABackend.make_cubin = to_machine_code if name.endswith(" few 1 gate_up") else lambda *_: b""
    own = {"scales": scales, **({"words": "*bf16"} if constants.get("FORMAT") == "bfloat16" else {})}
    arguments = {each: kind for each, kind in {**types, **own}.items() if each in kernel.arg_names}
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, each in enumerate(kernel.arg_names) if "*" in arguments.get(each, "")
    }
    source = ASTSource(kernel, arguments | dict.fromkeys(constants, "constexpr"), constants, aligned)
    options = {"num_warps": warps, "launch_pdl": True}
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("==", name)
    print("// bytes of shared memory:", program.metadata.shared)
    print(program.asm["ptx"])

adapted = {"ADAPTERS": 2, "RANK": 64, "SHARES": 8}
common = {"TOP_K": 4, "EXPERTS": 32, "BE": 32, "HAS_MAP": False, "PDL": True, "NATIVE": True}
common |= dict.fromkeys(adapted, 0)
tables = [(form, *point) for form in POINTS for point in POINTS[form] if form != "bfloat16" or point[0] == "many"]
for form, path, most in tables:
    for tiles, name, rows in zip(tiles_of(form, path, most), ("gate_up", "down"), (5760, 2880)):
        kernel = many.grouped if path == "many" else getattr(few, name)
        scales = {"mxfp4": "*i32", "float8_e4m3fn": "*fp32", "bfloat16": None}[form]
        sizes = launches._constants(TiledMatrix(None, scales, None, rows, 2880), tiles)
        scales = scales or "*bf16"
        own = {"FORMAT": form, "SPLITS": tiles.splits, "GATE_UP": name == "gate_up", "ONE": most == 1}
        compiled(f"{form} {path} {most} {name}", kernel, tiles.warps, scales, {**common, **sizes, **own})
        if path == "many" and name == "gate_up":
            own |= adapted
            compiled(f"{form} {path} {most} {name} adapted", kernel, tiles.warps, scales, {**common, **sizes, **own})
shape = {"BM": 64, "BN": 16, "BK": 64, "K": 2880, "GATE_UP": True}
compiled("shrink", many.shrink, 4, "*i32", {**common, **adapted, **shape})
"""


def opened_otherwise(ptx: str) -> tuple[int, list[str]]:
    """The number of opened registers, and the makers of registers that are not two adjacent words."""
    made: dict[str, str] = {}
    opened, otherwise = 0, []
    for line in map(str.strip, ptx.splitlines()):
        if pair := PAIR_OPENED.match(line):
            opened += 1
            if not WHOLE.match(made.get(pair[1], "")):
                otherwise.append(made.get(pair[1], f"nothing makes {pair[1]}"))
        elif line.endswith(";") and "%r" in line:
            targets = line.split("{", 1)[1].split("}")[0] if re.match(r"[^,]*\{", line) else line.split(",")[0]
            made.update(dict.fromkeys(re.findall(r"%r\d+", targets), line))
    return opened, otherwise


def written_while_read(ptx: str) -> tuple[int, list[str]]:
    """The number of products of registers with shared memory that run in parallel with other instructions, and the
    instructions in loops that write one of those registers before a wait has ended its product."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    products, found = set(), []
    for end, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if jump and labels.get(jump[1], end) < end:
            for at, writer, running in _two_rounds(lines, labels[jump[1]], end):
                products.add(at)
                found += [writer] if running else []
    return len(products), found


def _two_rounds(lines: list[str], begin: int, end: int) -> Iterator[tuple[int, str, bool]]:
    """(product, "", False) for each, and (product, instruction, True) for an instruction that writes what it reads."""
    committed: list[list[tuple[int, set[str]]]] = []
    issued: list[tuple[int, set[str]]] = []
    for at in [*range(begin, end)] * 2:
        line = re.sub(r"^@!?%p\d+\s+", "", lines[at])
        if product := re.match(r"wgmma\.mma_async\S*\s+\{[^}]*\}\s*,\s*\{([^}]*)\}", line):
            issued.append((at, set(re.findall(r"%\w+", product[1]))))
            yield at, "", False
        elif line.startswith("wgmma.commit_group"):
            committed, issued = [*committed, issued], []
        elif wait := re.match(r"wgmma\.wait_group\S*\s+(\d+);", line):
            committed = committed[len(committed) - int(wait[1]) :] if int(wait[1]) else []
        elif not re.match(r"(st|bra|cp|bar|red|setp|wgmma)\b", line):
            target = re.match(r"[a-z]\S*\s+(\{[^}]*\}|%\w+)", line)
            written = set(re.findall(r"%\w+", target[1])) if target else set()
            running = [one for group in (*committed, issued) for one in group]
            yield from ((product, line, True) for product, read in running if read & written)


def compiled(folder: Path) -> dict[str, str]:
    """The PTX of every tile of the packed formats' tables, by name."""
    script = folder / "compile.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(each.split("\n", 1) for each in done.stdout.split("== ")[1:])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_tile_opens_pairs_and_no_words_still_in_use(tmp_path):
    kernels = compiled(tmp_path)
    assert {"mxfp4 few 1 gate_up", "mxfp4 few 1 down"} <= kernels.keys()
    beside = 0
    for name, ptx in kernels.items():
        if name.startswith("mxfp4"):
            opened, otherwise = opened_otherwise(ptx)
            assert opened, f"nothing is opened in {name}"
            assert otherwise == [], name
        assert int(re.search(r"shared memory: (\d+)", ptx)[1]) <= SHARED, f"{name} does not fit a Hopper"
        products, overwritten = written_while_read(ptx)
        assert overwritten == [], name
        beside += products > 0
    assert beside >= 6, "the large tiles' products run beside what follows"
