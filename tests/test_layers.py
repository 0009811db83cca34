"""Dependencies point downwards only, and importing the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from setuptools import find_packages

PACKAGE = Path(__file__).parent.parent / "npu_gptoss"

# What each part may import of the others. `kernels` is the bottom; nothing imports serving.
BASE = {"cann", "errors", "envs", "files", "nominal", "progress", "tokenizer", ""}
ALLOWED: dict[str, set[str]] = {
    "kernels": BASE,
    "attention": BASE | {"kernels"},
    "moe": BASE | {"kernels"},
    "dense": BASE | {"kernels", "attention", "moe"},
    "graphs": BASE | {"kernels"},
    "harmony": BASE,
    "frontend": BASE | {"harmony"},
    "model": BASE | {"kernels", "attention", "moe", "dense"},
    "tiny": BASE | {"moe", "model", "harmony"},
    "engine": BASE | {"kernels", "attention", "moe", "dense", "graphs", "model", "harmony", "frontend"},
    "serving": BASE
    | {"kernels", "attention", "moe", "dense", "graphs", "model", "harmony", "frontend"}
    # of convert the reader of adapters
    | {"verify", "convert"},
    "verify": BASE | {"kernels", "attention", "moe", "dense", "graphs", "model", "engine", "tiny"},
    "convert": BASE | {"moe", "model", "engine"},
    "bench": BASE | {"kernels", "attention", "moe", "dense", "graphs", "model", "engine", "tiny", "verify"},
    "emulate": BASE,  # and ascend_emulator, a separate distribution
    "cann": set(),
    "errors": set(),
    "envs": {"errors"},
    "files": {"errors"},
    "tokenizer": {"errors", "files"},
    "cli": BASE,
    "plugin": BASE | {"serving"},
    # of serving only what imports no vLLM: limits, sizes, the entry points
    "doctor": BASE
    | {"kernels", "attention", "moe", "model", "harmony", "engine", "plugin", "serving", "verify"}
    # of bench the timing of a copy
    | {"bench"},
    "nominal": set(),
    "progress": set(),
}


def imported_names(path: Path) -> set[str]:
    """All imports of a file, also inside functions: `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively; here imports name the whole path"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_parts(path: Path) -> set[str]:
    """The imported parts of npu_gptoss; "" stands for the package itself."""
    parts = {p.stem for p in PACKAGE.iterdir()} | {""}
    return {(name + ".").split(".")[1] for name in imported_names(path) if name.split(".")[0] == "npu_gptoss"} & parts


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_a_higher_tier(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        assert imported_parts(path) == set()
        return
    assert part in ALLOWED, f"say in this test what {part} may import"
    forbidden = imported_parts(path) - ALLOWED[part] - {part}
    assert not forbidden, f"{path.relative_to(PACKAGE)} imports {sorted(forbidden)}"


def test_start_check_loads_no_model_and_no_engine_of_verify():
    """A server's start runs the short self-tests; the checks of `npu-gptoss verify` would import the engine."""
    heavy = {"model", "engine", "serving", "tiny"}
    light = ["attention_cases", "cases", "compare", "dense_cases", "moe_cases", "rank", "tolerances"]
    light += [f"self_test/{name}" for name in ("attention", "dense", "experts", "record")]
    names = {f"verify.{name.replace('/', '.')}" for name in light} | {"verify", "verify.self_test"}
    for path in [PACKAGE / "verify" / f"{name}.py" for name in light]:
        imported = {name.removeprefix("npu_gptoss.") for name in imported_names(path)}
        modules = {n for n in imported if (PACKAGE / f"{n.replace('.', '/')}.py").is_file() and n.startswith("verify")}
        assert modules <= names, path
        assert not imported_parts(path) & heavy, path


def test_foreign_serving_code_is_imported_by_serving_only():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imported_names(path)}
        if path.relative_to(PACKAGE).parts[0] not in ("serving", "plugin.py"):
            assert not roots & {"vllm", "vllm_ascend", "transformers"}, path


def test_front_end_loads_no_engine_and_no_client_of_its_apis():
    names = ", ".join(f"npu_gptoss.frontend.{path.stem}" for path in (PACKAGE / "frontend").glob("[a-z]*.py"))
    foreign = {"torch", "vllm", "openai", "anthropic", "fastapi"}
    code = f"import sys, {names}; sys.exit(bool({foreign} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_product_and_emulator_do_not_import_each_other():
    """Except `npu-gptoss emulate` and `verify --compile`, which call the emulator if it is installed."""
    root = PACKAGE.parent
    found = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {name.split(".")[0] for name in find_packages(str(root), **found)} == {"npu_gptoss"}
    ours = [path.name for path in PACKAGE.rglob("*.py") if "ascend_emulator" in path.read_text()]
    assert sorted(ours) == ["compiled.py", "emulate.py"]
    theirs = [path.name for path in (root / "emulator/ascend_emulator").rglob("*.py") if imported_parts(path)]
    assert theirs == []


def test_importing_the_package_and_plugin_imports_no_torch_and_no_vllm():
    code = "import sys, npu_gptoss.plugin, npu_gptoss.cli; sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
