"""The generated libraries: read from real ELF files, complete, and failing by name."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_emulator import elf, stubs


def compile_library(path: Path, source: str, *flags: str) -> elf.Library:
    path.with_suffix(".c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c"), *flags], check=True)
    return elf.read(path)


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[elf.Library, elf.Library, Path]:
    """A library of a 'wheel', the vendor's library that it links, and the folder."""
    source = (
        "int vendor_call(int); int _ZN6vendor5cleanEv(void); "
        "int use(void) { return vendor_call(1) + _ZN6vendor5cleanEv(); }"
    )
    vendor = compile_library(
        tmp_path / "libvendor.so", "int vendor_call(int x) { return x; } int _ZN6vendor5cleanEv(void) { return 0; }",
        "-Wl,-soname,libvendor.so",
    )  # fmt: skip
    user = compile_library(tmp_path / "libuser.so", source, f"-L{tmp_path}", "-lvendor")
    return user, vendor, tmp_path


def test_elf_reads_needed_and_defined_names(wheel: tuple[elf.Library, elf.Library, Path]) -> None:
    user, vendor, _ = wheel
    assert "libvendor.so" in user.needed
    assert {"vendor_call", "_ZN6vendor5cleanEv"} <= {symbol.name for symbol in user.undefined if not symbol.weak}
    assert "use" in user.defined
    assert vendor.soname == "libvendor.so"


def test_elf_reads_versions(tmp_path: Path) -> None:
    library = compile_library(tmp_path / "libtext.so", '#include <stdio.h>\nint say(void) { return puts(""); }')
    (puts,) = [symbol for symbol in library.undefined if symbol.name == "puts"]
    assert puts.provider.startswith("libc.so")
    assert puts.version.startswith("GLIBC_")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not an ELF file, but long enough to be looked at: " + "x" * 100)
    with pytest.raises(ValueError, match="not a 64-bit"):
        elf.read(path)


def test_plan_names_missing_libraries_and_their_symbols(wheel: tuple[elf.Library, elf.Library, Path]) -> None:
    user, vendor, _ = wheel
    (stub,) = stubs.plan([user], [], stubs.system_symbols())
    assert stub.soname == "libvendor.so"
    assert set(stub.symbols) == {"vendor_call", "_ZN6vendor5cleanEv"}
    assert stubs.plan([user], [vendor], stubs.system_symbols()) == []


def test_generated_functions_fail_by_name(wheel: tuple[elf.Library, elf.Library, Path]) -> None:
    user, _, folder = wheel
    out = folder / "stubs"
    manifest = stubs.build(stubs.plan([user], [], stubs.system_symbols()), out, [])
    assert manifest == {"libvendor.so": {"emulated": 0, "failing": 2}}
    code = (
        f"import ctypes; l = ctypes.CDLL({str(out / 'libvendor.so')!r}); l.vendor_call.restype = ctypes.c_long; "
        "print(l.vendor_call(1)); l._ZN6vendor5cleanEv()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == str(stubs.ACL_ERROR_NOT_EMULATED)
    assert "vendor_call of libvendor.so is not implemented" in run.stderr
    assert "_ZN6vendor5cleanEv is not implemented" in run.stderr, "a C++ function throws"
    assert run.returncode


def test_cuda_stubs_say_that_there_is_no_device(tmp_path: Path) -> None:
    stub = stubs.Stub(
        "libcudart.so.12", {"cudaGetDeviceCount": "libcudart.so.12", "cudaGetErrorString": "libcudart.so.12"}
    )
    stubs.build([stub], tmp_path, [])
    library = ctypes.CDLL(str(tmp_path / "libcudart.so.12"))
    library.cudaGetErrorString.restype = ctypes.c_char_p
    assert library.cudaGetDeviceCount() == 100
    assert b"no CUDA" in library.cudaGetErrorString(100)


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    with pytest.raises(stubs.StubError, match="torch_npu is not installed"):
        stubs.wheel_libraries(tmp_path, ["torch_npu"])
