"""Makes the shared libraries that the installed wheels need and this machine lacks: failing stubs, and the runtime.

torch-npu links CANN's libraries with BIND_NOW, so every symbol must exist before its first line runs. This module
reads all ELF files of the wheels, subtracts the symbols that they, the C library and libstdc++ define, and writes one
library per missing soname. Sources in `runtime/` implement some symbols. Every other function is generated and
**fails**: a C function records its name for `aclGetRecentErrMsg` and returns an error code, a C++ function throws.

The CUDA libraries of torch's wheel are stubbed the same way: each call returns cudaErrorNoDevice, so
`torch.cuda.is_available()` is False and no NVIDIA package is installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import elf
from ascend_emulator.errors import EmulatorError

SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1",
          "libutil.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")  # fmt: skip
RUNTIME = Path(__file__).parent / "runtime"
# soname -> sources in runtime/ that implement a part of it
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("memory.cpp", "machine.cpp", "capture.cpp", "streams.cpp", "device.cpp", "aclop.cpp"),
    "libhccl.so": ("hccl.cpp", "hccl_shm.cpp"),
    "libopapi.so": ("opapi.cpp",),
    "libacl_op_compiler.so": ("op_compiler.cpp",),
    "libascendalog.so": ("log.cpp",),
    "liberror_manager.so": ("error_manager.cpp",),
}
# libraries that are opened by name (dlopen) at import: they must exist
OPENED_BY_NAME = ("libopapi.so",)
# a folder of vllm-ascend's wheels since 0.13: operators for CANN's own loader, which no process opens here
FOR_CANN = "_cann_ops_custom"
FLAGS = ("-std=c++17", "-fPIC", "-O2", "-w", "-fno-builtin")
CUDA = re.compile(r"lib(cu|nv|nccl)")
CUDA_ERROR_NO_DEVICE = 100
ACL_ERROR_NOT_EMULATED = 500099  # outside of the codes that AscendCL defines
PYTHON = re.compile("_?Py[A-Z]?")  # defined by the interpreter
MANIFEST = "manifest.json"


class StubError(EmulatorError):
    """The wheels or the compiler do not fit the generator."""


@dataclass(frozen=True)
class Stub:
    """A library to make: the symbols that others need from it, name -> version ('' = unversioned)."""

    soname: str
    symbols: Mapping[str, str]


def wheel_libraries(site_packages: Path, packages: Sequence[str]) -> list[elf.Library]:
    """Every ELF library of the named packages (folders of `site_packages`)."""
    found = []
    for package in packages:
        folder = site_packages / package
        if not folder.is_dir():
            raise StubError(f"{package} is not installed in {site_packages}: run `make setup-emulated` first.")
        for path in sorted(folder.rglob("*.so*")):
            if path.is_file() and not path.is_symlink() and FOR_CANN not in path.parts:
                found.append(elf.read(path))
    return found


def system_symbols(names: Iterable[str] = SYSTEM) -> set[str]:
    """Symbols that the C and C++ libraries of this machine define."""
    folders = (
        f"/lib/{os.uname().machine}-linux-gnu",
        f"/usr/lib/{os.uname().machine}-linux-gnu",
        "/lib64",
        "/usr/lib64",
    )
    defined: set[str] = set()
    for name in names:
        path = next((p for p in (Path(folder) / name for folder in folders) if p.exists()), None)
        if path is not None:
            defined |= elf.read(path.resolve()).defined
    return defined


def plan(libraries: Sequence[elf.Library], others: Sequence[elf.Library], defined: set[str]) -> list[Stub]:
    """The libraries that `libraries` lack, with their exports. `others` exist, and so do the symbols in `defined`.

    A versioned symbol names its library. An unversioned symbol goes to the first missing library that its user needs:
    the loader looks up by name, not by library.
    """
    there = [*libraries, *others]
    present = {library.path.name for library in there} | {library.soname for library in there} | set(SYSTEM)
    missing: dict[str, dict[str, str]] = {}
    for library in libraries:
        for name in library.needed:
            if name not in present:
                missing.setdefault(name, {})
    defined = defined.union(*(library.defined for library in there))
    for library in libraries:
        own = [name for name in library.needed if name in missing]
        for symbol in library.undefined:
            if symbol.version:
                if symbol.provider in missing:
                    missing[symbol.provider][symbol.name] = symbol.version
            elif own and not symbol.weak and symbol.name not in defined and not PYTHON.match(symbol.name):
                missing[_home(symbol.name, own)][symbol.name] = ""
                defined.add(symbol.name)
    return [Stub(name, missing[name]) for name in sorted(missing)]


def _home(symbol: str, candidates: Sequence[str]) -> str:
    """The library in `candidates` that the symbol's name belongs to; the first if the name does not show it."""
    prefixes = {"Hccl": "libhccl.so", "_ZN3atb": "libatb.so", "_ZNK3atb": "libatb.so", "acl": "libascendcl.so"}
    for prefix, soname in prefixes.items():
        if symbol.startswith(prefix) and soname in candidates:
            return soname
    return candidates[0]


def source(stub: Stub, implemented: set[str]) -> str:
    """C++ source of a library in which every function fails, except `implemented`."""
    wanted = sorted(set(stub.symbols) - implemented)
    if CUDA.match(stub.soname):
        body = [f"FUNCTION({name})" for name in wanted if not re.search("Get(Error|Status)?(String|Name)$", name)]
        text = [f"TEXT({name})" for name in wanted if re.search("Get(Error|Status)?(String|Name)$", name)]
        return (
            f'extern "C" {{\n#define FUNCTION(n) long n() {{ return {CUDA_ERROR_NO_DEVICE}; }}\n'
            '#define TEXT(n) const char *n() { return "stub: no CUDA on this machine"; }\n'
            + "\n".join(body + text)
            + "\n}\n"
        )
    functions = [f"THROWS({name})" if name.startswith("_Z") else f"FAILS({name})" for name in wanted]
    return (
        "#include <cstdio>\n#include <stdexcept>\n#include <string>\n"
        'extern "C" {\n'
        "__attribute__((weak)) void emulator_not_implemented(const char *symbol);\n"
        "static long fail(const char *symbol) {\n"
        "  if (emulator_not_implemented) emulator_not_implemented(symbol);\n"
        '  else fprintf(stderr, "emulated NPU: %s of ' + stub.soname + ' is not implemented\\n", symbol);\n'
        f"  return {ACL_ERROR_NOT_EMULATED};\n}}\n"
        "#define FAILS(n) long n() { return fail(#n); }\n"
        "#define THROWS(n) void n() { fail(#n); "
        'throw std::runtime_error("emulated NPU: " #n " is not implemented"); }\n' + "\n".join(functions) + "\n}\n"
    )


def _version_script(stub: Stub) -> str:
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in stub.symbols.items():
        if version:
            versions[version].append(name)
    return "".join(
        f"{version} {{ global: {' '.join(n + ';' for n in names)} }};\n" for version, names in versions.items()
    )


def _compile(arguments: Sequence[str]) -> None:
    compiler = os.environ.get("CXX", "g++")
    try:
        run = subprocess.run([compiler, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise StubError(
            f"the C++ compiler {compiler} is not there. On Debian and Ubuntu: apt install g++; or name one in CXX."
        ) from None
    if run.returncode:
        raise StubError(f"{compiler} refused {arguments[-1]}:\n{run.stderr[-3000:]}")


def _compile_runtime(soname: str, out: Path, include: Sequence[Path]) -> tuple[list[Path], set[str]]:
    """Object files of the implemented part of `soname`, and the symbols that they define."""
    objects, defined = [], set()
    for name in IMPLEMENTED.get(soname, ()):
        target = out / f"{soname}.{name}.o"
        folders = [f"-I{path}" for path in [RUNTIME, *include]]
        _compile([*FLAGS, "-pthread", *folders, "-c", "-o", str(target), str(RUNTIME / name)])
        objects.append(target)
    if objects:
        probe = out / f".{soname}.probe"
        _compile([*FLAGS, "-shared", "-pthread", "-o", str(probe), *map(str, objects)])
        defined = set(elf.read(probe).defined)
        probe.unlink()
    return objects, defined


def build(stubs: Sequence[Stub], out: Path, include: Sequence[Path]) -> dict[str, dict[str, int]]:
    """Compiles all libraries into `out`; returns soname -> {emulated, failing} counts, as in the manifest.

    A symbol that the runtime implements is generated nowhere: the loader would take the first one.
    """
    out.mkdir(parents=True, exist_ok=True)
    stubs = sorted(stubs, key=lambda stub: stub.soname != "libascendcl.so")  # the others link it
    compiled = {stub.soname: _compile_runtime(stub.soname, out, include) for stub in stubs}
    implemented = set().union(*(defined for _, defined in compiled.values()))
    manifest = {}
    for stub in stubs:
        objects, own = compiled[stub.soname]
        generated = out / f"{stub.soname}.cpp"
        generated.write_text(source(stub, implemented))
        extra = [f"-Wl,-soname,{stub.soname}", "-pthread"]
        script = _version_script(stub)
        if script:
            (out / f"{stub.soname}.map").write_text(script)
            extra.append(f"-Wl,--version-script,{out / stub.soname}.map")
        if stub.soname != "libascendcl.so" and "libascendcl.so" in compiled:
            extra += [f"-L{out}", "-Wl,--no-as-needed", "-l:libascendcl.so"]
        temporary = out / f".{stub.soname}.new"
        _compile([*FLAGS, "-shared", "-o", str(temporary), str(generated), *map(str, objects), *extra])
        temporary.rename(out / stub.soname)
        for path in objects:
            path.unlink()
        failing = len(set(stub.symbols) - implemented)
        manifest[stub.soname] = {"emulated": len(own), "failing": failing}
    return manifest


def torch_stubs(site_packages: Path) -> list[Stub]:
    """CUDA libraries that torch's wheel lacks if it was installed without dependencies; may be empty."""
    return plan(wheel_libraries(site_packages, ["torch"]), [], system_symbols())


def ascend_stubs(site_packages: Path) -> list[Stub]:
    """The CANN libraries that torch-npu's and vllm-ascend's wheels need."""
    packages = [name for name in ("torch_npu", "vllm_ascend") if (site_packages / name).is_dir()]
    torch = wheel_libraries(site_packages, ["torch"])
    stubs = plan(wheel_libraries(site_packages, packages), torch, system_symbols())
    have = {stub.soname for stub in stubs}
    return stubs + [Stub(name, {}) for name in OPENED_BY_NAME if name not in have]


def generate(site_packages: Path, out: Path) -> dict[str, dict[str, int]]:
    """Writes all missing libraries of the installed wheels, and `manifest.json`, into `out`."""
    manifest = {}
    cuda = torch_stubs(site_packages)
    if cuda:
        manifest.update(build(cuda, out, []))
    if (site_packages / "torch_npu").is_dir():
        third_party = site_packages / "torch_npu/include/third_party"
        include = [third_party.parent, third_party / "acl/inc", third_party / "hccl/inc"]
        manifest.update(build(ascend_stubs(site_packages), out, include))
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return manifest
