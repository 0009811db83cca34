"""Finds and runs the compiler's programs, from the wheels of triton-ascend and ascendnpu-ir."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator.errors import EmulatorError

HOW = "make setup-ascend-compiler makes an environment that has all (.venv-ascend-compiler)"


class CompilerError(EmulatorError):
    """The compiler is not usable here, or refuses a kernel."""


@dataclass(frozen=True)
class Tools:
    """adapter: Triton's dialect to linalg. opt: single passes, MLIR's own too. compile: the whole pipeline."""

    adapter: Path
    opt: Path
    compile: Path


@functools.cache
def tools() -> Tools:
    """Finds the programs and puts them where triton-ascend looks for them. Raises CompilerError."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise CompilerError("TRITON_INTERPRET is set, and with it Triton compiles nothing: unset it")
    folders = {}
    for module, package in (("triton", "triton-ascend==3.2.0"), ("ascendnpuir", "ascendnpu-ir==1.2.0")):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise CompilerError(f"{package} is not installed in this Python; {HOW}")
        folders[module] = Path(spec.origin).parent
    programs = folders["ascendnpuir"] / "bin"
    found = Tools(
        folders["triton"] / "backends/ascend/triton-adapter-opt",
        programs / "bishengir-opt",
        programs / "bishengir-compile",
    )
    for path in (found.adapter, found.opt, found.compile):
        if not path.is_file():
            raise CompilerError(f"{path} is not there: this Triton is not Triton-Ascend 3.2.0; {HOW}")
    path = os.environ.get("PATH", "")
    if str(programs) not in path.split(os.pathsep):  # triton-ascend looks for bishengir-compile when it is imported
        os.environ["PATH"] = f"{programs}{os.pathsep}{path}"
    return found


@dataclass(frozen=True)
class Run:
    """output: the written file, "" for none. said: all output of the program."""

    status: int
    output: str
    said: str

    def reason(self) -> str:
        """The first error about the kernel, without the path of the removed file."""
        errors = [line.partition("error: ")[2] for line in self.said.splitlines() if "error: " in line]
        own = [error for error in errors if not error.startswith("Failed to run BiShengHIR pipeline")]
        return (own or errors or self.said.strip().splitlines()[-1:] or [f"exit status {self.status}, no word"])[0]


def run(program: Path, text: str, options: Sequence[str]) -> Run:
    """Runs a program of MLIR: text in, text out."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.mlir", Path(folder) / "out.mlir"
        source.write_text(text)
        done = subprocess.run(
            [str(program), str(source), *options, "-o", str(target)], capture_output=True, text=True, errors="replace"
        )
        return Run(done.returncode, target.read_text() if target.is_file() else "", f"{done.stdout}\n{done.stderr}")
