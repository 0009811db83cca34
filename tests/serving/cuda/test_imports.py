"""`make serve` on a GPU leaves some of vLLM 0.33's packages out: none that a start imports. Needs no GPU.

vLLM's start on a GPU cannot run here, so the test reads its sources: the imports that each module runs on CUDA.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import resolve_name
from pathlib import Path

import pytest

pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")

import vllm

from scripts.setup.environments import REQUIREMENTS
from scripts.setup.machine import read_pins

SITE = Path(vllm.__file__).parents[1]
WARM_UP = "vllm.model_executor.warmup.kernel_warmup"  # imports in its body, whatever the model is
STARTS = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    WARM_UP,
)


def source(module: str) -> Path | None:
    path = SITE / module.replace(".", "/")
    return next((found for found in (path / "__init__.py", path.with_suffix(".py")) if found.is_file()), None)


def at_import(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that a module runs on CUDA; not within `try`, functions, or other conditions."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "is_cuda" in (test := ast.unparse(statement.test)):
            yield from at_import(statement.orelse if test.startswith("not ") else statement.body)
        elif isinstance(statement, ast.If) and "is_rocm" in ast.unparse(statement.test):
            yield from at_import(statement.orelse)


def names(module: str, path: Path, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    base = resolve_name("." * statement.level + (statement.module or ""), package)
    yield base
    yield from (name for alias in statement.names if source(name := f"{base}.{alias.name}"))


def imported() -> dict[str, str]:
    """package -> the module of vLLM's that imports it."""
    found, todo, seen = {}, list(STARTS), set()
    while todo:
        module = todo.pop()
        parts = module.split(".")
        if parts[0] != "vllm":
            continue
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if name in seen or (path := source(name)) is None:
                continue
            seen.add(name)
            body = ast.parse(path.read_text(encoding="utf-8")).body
            if name == WARM_UP:
                (warm_up,) = (f for f in body if isinstance(f, ast.FunctionDef) and f.name == "kernel_warmup")
                body += warm_up.body
            for other in (other for statement in at_import(body) for other in names(name, path, statement)):
                todo.append(other)
                found.setdefault(other.partition(".")[0], name)
    return {
        name: where for name, where in found.items() if name not in {"vllm", "__future__", *sys.stdlib_module_names}
    }


def test_the_imports_of_a_start_on_a_gpu_are_installed() -> None:
    """torchvision was left out, and every engine ended at the warm-up of a kernel of another model's."""
    found, pins = imported(), read_pins(REQUIREMENTS / "cuda.txt")
    distributions = packages_distributions()
    lacking = {
        name: where
        for name, where in found.items()
        if not {one.lower().replace("_", "-") for one in distributions.get(name, [name])} & set(pins)
    }
    assert not lacking
    assert {"torch", "torchvision", "transformers", "xgrammar"} <= set(found), "or little was read"
