"""Triton-Ascend's kernels on the emulated device: own cases, and those of stock vllm-ascend 0.23."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_emulator.compiler.tools import CompilerError
from ascend_emulator.compiler.touched import telling
from ascend_emulator.errors import EmulatorError
from ascend_emulator.launch import Machine, environment
from ascend_emulator.triton_launches import site_packages

from emulator.tests import machine

FILE = "triton_cases.py"
STOCK = "stock_triton_cases.py"
COMPILER = Path(__file__).parents[2] / ".venv-ascend-compiler"
# both environments have Python 3.11
PACKAGES = COMPILER / "lib/python3.11/site-packages"


needs_compiler = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the compiler is not set up: make setup-ascend-compiler"
)


@pytest.mark.emulated
@pytest.mark.ascend_compiler
@needs_compiler
@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_launch(case: str) -> None:
    machine.check(FILE, case, Machine(triton=PACKAGES))


@pytest.mark.emulated
@pytest.mark.ascend_compiler
@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("case", machine.cases_of(STOCK))
def test_stock_s_kernel_equals_stock_without_triton(case: str) -> None:
    machine.check(STOCK, case, Machine("9.1", triton=PACKAGES))


def test_triton_interpret_is_dropped_when_the_compiler_is_used(tmp_path: Path) -> None:
    """Our own tests set it, and their child processes would inherit it."""
    base = {"TRITON_INTERPRET": "1"}
    assert "TRITON_INTERPRET" not in environment(Machine(triton=tmp_path), tmp_path, base)
    assert environment(Machine(), tmp_path, base)["TRITON_INTERPRET"] == "1"


def test_environment_without_the_compiler_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(EmulatorError, match=r"has no triton, ascendnpuir, pybind11 .*make setup-ascend-compiler"):
        site_packages(tmp_path)


def test_trace_refuses_unknown_memory_accesses() -> None:
    head = "  func.func @kernel(%arg0: memref<?xi32>, %arg1: i32) attributes {} {"
    piece = "    %piece = memref.reinterpret_cast %arg0 to offset: [0], sizes: [4], strides: [1] : memref<?xi32> to {}"
    kind = "memref<4xi32, strided<[1]>>"
    known = [head, piece.format(kind), f"    %0 = memref.load %piece[%c0] : {kind}"]
    assert "call @kernel_read_i32" in telling("\n".join(known))
    with pytest.raises(CompilerError, match=r"its access is unknown: hivm\.gather %piece"):
        telling("\n".join([*known, "    hivm.gather %piece"]))
    with pytest.raises(CompilerError, match="memref<4xi32, #map> is unknown"):
        telling("\n".join([*known[:2], "    %0 = memref.load %piece[%c0] : memref<4xi32, #map>"]))
    other = "    %piece = memref.subview %alloc[0] [4] [1] : memref<8xi32> to memref<4xi32>"
    assert telling("\n".join([*known, other, "    hivm.gather %piece"])).count("call @") == 1
