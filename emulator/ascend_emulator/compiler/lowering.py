"""Lowers a Triton kernel to linalg with triton-ascend's front end and its options for the emulated card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any

from ascend_emulator import cards, settings
from ascend_emulator.compiler.tools import CompilerError, tools

READ = 0  # triton-ascend's kind of a tensor; 1: written, 2: both


@dataclass(frozen=True)
class Program:
    """A kernel for given types and constants. types: of its other arguments, in order, as Triton names them ("*i16",
    "i32"). linalg: MLIR text."""

    name: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    linalg: str

    @property
    def written(self) -> tuple[int, ...]:
        """Indices in `types` of the arguments that the kernel writes."""
        pointers = [place for place, (_, kind) in enumerate(self.types) if kind.startswith("*")]
        arguments = re.findall(r"%arg\d+: memref<[^>]*>( \{[^}]*\})?", self.linalg.partition(") attributes")[0])
        given = arguments[len(arguments) - len(pointers) :]  # behind a lock and a work space
        kinds = [re.search(r"tt\.tensor_kind = (\d+)", words) for words in given]  # none: the kernel does not use it
        return tuple(place for place, kind in zip(pointers, kinds, strict=True) if kind and int(kind[1]) != READ)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.constants)})"


def target() -> str:
    """The card that kernels are compiled for."""
    return settings.text("SOC", cards.DEFAULT.soc)


def lower(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> Program:
    """Lowers a `triton.jit` function. Raises CompilerError when the front end refuses it."""
    tools()
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.compiler.errors import CompilationError

    backend = make_backend(card := GPUTarget("npu", target(), 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, dict(types), dict(constants))
    metadata = {"target": card, **vars(options)}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        linalg = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace")
        first = next((line for line in said.splitlines() if "error: " in line), said.strip()[:200])
        reason = first.partition("error: ")[2] or first
        raise CompilerError(f"triton-adapter-opt refuses {kernel.__name__}: {reason}") from error
    except CompilationError as error:
        raise CompilerError(f"Triton-Ascend's front end refuses {kernel.__name__}: {error}") from error
    name = re.search(r"func\.func\s+@(\w+)", linalg)[1]
    return Program(name, tuple(types.items()), tuple(constants.items()), linalg)
