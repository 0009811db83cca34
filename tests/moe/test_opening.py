"""What a thread opens as one 32-bit word must be two neighbouring words of the layout, seen in the compiled kernels.

The instructions that open MXFP4 take the third codes of words 2i and 2i + 1 from one register (`layout.mxfp4_words`).
Triton packs whatever lies side by side in a thread; if it ever dealt words out singly, weights would be wrong without
an error. Triton compiles for a GPU that is not there, so this needs none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

PAIR_OPENED = re.compile(r"\s*and\.b32 a, (%r\d+), 0x81C081C0")
# a whole register straight from memory, or the zeros of a tile that is not there
WHOLE = re.compile(r"(@!?%p\d+ )?(ld\.shared(\.v\d)?\.b32|ldmatrix\.|ld\.global(\.\w+)*\.b32|mov\.b32\s+%r\d+, 0;)")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from npu_gptoss.moe.triton import few, many
from npu_gptoss.moe.triton.tuned import TABLE

types = {
    "words": "*u16", "scales": "*i32", "bias": "*bf16", "inner": "*bf16", "limit": "fp32", "x": "*bf16", "out": "*bf16",
    "shares": "*fp32", "topk_weights": "*fp32", "topk_ids": "*i64", "expert_map": "*i32", "lists": "*i32",
    "counts": "*i32", "slots": "i32", "order": "*i32", "ends": "*i32",
}
for path, most, *both in TABLE["mxfp4"]:
    for tiles, name, rows in zip(both, ("gate_up", "down"), (5760, 2880)):
        kernel = many.grouped if path == "many" else getattr(few, name)
        arguments = {each: types[each] for each in kernel.arg_names if each in types}
        constants = {
            "FORMAT": "mxfp4", "TOP_K": 4, "R": rows, "K": 2880, "BM": tiles.rows, "BN": tiles.columns, "EXPERTS": 32,
            "BE": 32, "UNROLL": tiles.unroll, "HALVES": tiles.halves, "STAGES": tiles.stages, "SPLITS": tiles.splits,
            "GATE_UP": name == "gate_up", "HAS_MAP": False, "ONE": most == 1, "PDL": True, "NATIVE": True,
        }
        constants = {each: value for each, value in constants.items() if each in kernel.arg_names}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, each in enumerate(kernel.arg_names)
            if "*" in arguments.get(each, "")
        }
        source = ASTSource(kernel, arguments | dict.fromkeys(constants, "constexpr"), constants, aligned)
        options = {"num_warps": tiles.warps, "launch_pdl": True}
        print(f"== {path} {most} {name}")
        print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def opened_otherwise(ptx: str) -> tuple[int, list[str]]:
    """How many registers are opened, and what made those that are not two words as they lie in memory."""
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


def test_words_put_together_by_hand_are_seen():
    for line, fine in (
        ("ld.shared.v2.b32 {%r1, %r2}, [%r9];", True),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];", True),
        ("mov.b32 %r2, {%rs1, %rs2};", False),
        ("prmt.b32 %r2, %r7, %r8, 0x5410;", False),
    ):
        opened, otherwise = opened_otherwise(f"{line}\n and.b32 a, %r2, 0x81C081C0;")
        assert (opened, otherwise) == (1, [] if fine else [line])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_tile_of_the_table_opens_pairs_of_neighbours(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = done.stdout.split("== ")[1:]
    assert {name for ptx in kernels for name in ptx.split()[2:3]} == {"gate_up", "down"}
    for ptx in kernels:
        opened, otherwise = opened_otherwise(ptx)
        assert opened, f"nothing is opened in {ptx.splitlines()[0]}"
        assert otherwise == [], ptx.splitlines()[0]
