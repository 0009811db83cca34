"""Names that serving imports from vLLM and vllm-ascend exist in each release and come from `lines` only."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ascend_emulator.launch import Machine, environment

from emulator.tests.machine import venv
from npu_gptoss.serving import compat, releases
from npu_gptoss.serving.releases import ascend_0_11, ascend_0_23, vllm_0_33

SERVING = Path(releases.__file__).parent.parent
FOREIGN = ("vllm", "vllm_ascend")


def imports(path: Path, without: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Returns (module, name) of every `from … import …` of a file; name is "" for `import module`.

    `without`: functions of the file that are left out.
    """
    found, text = [], path.read_text()
    as_names = "names" if f"from {releases.__name__} import vllm as names" in text else None
    statements = ast.parse(text).body
    kept = [part for part in statements if not isinstance(part, ast.FunctionDef) or part.name not in without]
    for node in ast.walk(ast.Module(kept, [])):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == as_names:
            found.append((f"{releases.__name__}.vllm", node.attr))
    return found


def foreign(path: Path, without: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    return [(module, name) for module, name in imports(path, without) if module.split(".")[0] in FOREIGN]


FILES = sorted(SERVING.rglob("*.py"))


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not {"releases", "compat", "openai"} & set(path.parts)],
    ids=lambda path: path.name,
)
def test_foreign_names_are_imported_through_lines_only(path):
    assert not foreign(path)


@pytest.mark.parametrize("package", ["vllm", "ascend"])
def test_every_release_has_exactly_the_names_that_serving_uses(package):
    paths = [path for path in FILES if "cuda" not in path.parts]  # the next test's
    used = {name for path in paths for module, name in imports(path) if module == f"{releases.__name__}.{package}"}
    used |= {"ModelRegistry"} if package == "vllm" else set()  # plugin.py
    for row in releases.RELEASES:
        if "npu" not in row.devices:
            continue
        module = row.module(package)
        has = set(" ".join(module.MODULES.values()).split())
        own = {name for name in vars(module) if not name.startswith("_")}
        assert has <= used <= has | own


def test_the_release_for_nvidia_has_the_names_that_its_model_uses():
    shared = [SERVING / name for name in ("canary.py", "limits.py", "metrics.py", "registered.py")]
    shared += {Path(inspect.getfile(patch.install)) for patch in compat.patches() if "0.33" in patch.releases}
    shared += [path for path in FILES if "openai" in path.parts]
    used = {name for path in shared for module, name in imports(path) if module == f"{releases.__name__}.vllm"}
    model = [path for path in FILES if "cuda" in path.parts]
    used |= {name for path in model for module, name in imports(path) if module.startswith(f"{releases.__name__}.vllm")}
    has = set(" ".join(vllm_0_33.MODULES.values()).split())
    assert (used | {"ModelRegistry"}) - vars(vllm_0_33).keys() == has  # plugin.py takes that one


def test_versions_are_compared_in_lines_only():
    for path in Path(releases.__file__).parents[2].rglob("*.py"):
        if {"releases", "emulator"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                assert not [text for text in constants if re.match(r"0\.\d+\.\d+", str(text))], f"{path}:{node.lineno}"


@pytest.mark.serving
def test_vllm_has_every_name_of_its_release_and_of_the_repairs():
    pytest.importorskip("vllm")
    for module, names in releases.here().module("vllm").MODULES.items():
        found = importlib.import_module(module)
        for name in names.split():  # a submodule is an attribute only once it is imported
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), module
    for path in (SERVING / "compat").glob("*.py"):
        own = [patch for patch in compat.patches() if patch.file == path.name]
        here = {line for patch in own for line in patch.releases}
        others = frozenset(patch.install.__name__ for patch in own if releases.here().name not in patch.releases)
        for module, name in foreign(path, others) if releases.here().name in here else ():
            if name and module != "vllm._C":
                found = importlib.import_module(module)
                assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), f"{path.name}: {module}"


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("line", "machine", "worker"),
    [(ascend_0_11, Machine(), "worker_v1"), (ascend_0_23, Machine("9.1"), "worker")],
    ids=["0.11", "0.23"],
)
def test_vllm_ascend_has_every_name_of_its_release(line, machine, worker):
    place = venv(machine)
    code = (
        "import importlib, json, sys, vllm.v1.engine.core; importlib.import_module(sys.argv[2]); "
        "modules = json.loads(sys.argv[1]); "
        "print([(m, n) for m, ns in modules.items() for n in ns.split() if not hasattr(importlib.import_module(m), n)])"
    )
    run = subprocess.run(
        [str(place / "bin/python"), "-c", code, json.dumps(line.MODULES), f"vllm_ascend.worker.{worker}"],
        env=environment(machine, place),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.splitlines()[-1:] == ["[]"], run.stderr[-3000:]


def test_a_version_belongs_to_one_release_and_each_has_its_files():
    for row in releases.RELEASES:
        for release in row.vllm.releases:
            assert releases.release_of(release) is releases.release_of(f"{release}+empty") is row
        assert row.module("vllm").MODULES
        assert "npu" not in row.devices or row.module("ascend").MODULES
    assert releases.release_of("0.10.2") is releases.release_of(None) is None


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(AttributeError, match=r"VllmConfi.*; it has .*VllmConfig"):
        releases.name_here("vllm", "VllmConfi")


@pytest.mark.skipif(releases.here().name != "0.23", reason="needs vLLM 0.23")
@pytest.mark.parametrize(
    ("asked", "method", "padded", "backend", "ahead", "mode"),
    [
        (None, None, True, "uni", True, "FULL_DECODE_ONLY"),
        (False, None, True, "uni", False, "FULL_DECODE_ONLY"),
        (None, "ngram", True, "uni", False, "FULL_AND_PIECEWISE"),
        (None, "eagle3", True, "mp", True, "FULL_DECODE_ONLY"),
        (None, "eagle3", False, "mp", False, "FULL_AND_PIECEWISE"),
        (True, "eagle3", True, "mp", True, "FULL_DECODE_ONLY"),
        (None, None, True, "none", False, "FULL_DECODE_ONLY"),
    ],
)
def test_graphs_are_chosen_for_the_steps_that_0_23_will_schedule(asked, method, padded, backend, ahead, mode):
    """Drafts that are scheduled as they come differ in rows, which no graph of whole steps takes."""
    from vllm.config import CompilationMode
    from vllm.config.vllm import OptimizationLevel
    from vllm.v1.executor import Executor

    drafter = None if method is None else SimpleNamespace(method=method, disable_padded_drafter_batch=not padded)
    executor = type("Own", (Executor,), {}) if backend == "none" else backend  # one that waits for each step
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asked),
        speculative_config=drafter,
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        compilation_config=SimpleNamespace(mode=None),
        optimization_level=OptimizationLevel.O2,
    )
    assert ascend_0_23.runs_ahead(config) == ahead
    assert ascend_0_23.default_graphs(config) == mode
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    assert ascend_0_23.default_graphs(config) == mode
    config.compilation_config.mode = CompilationMode.NONE
    assert ascend_0_23.default_graphs(config) == "FULL_DECODE_ONLY", "of pieces there are none"
    config.optimization_level = OptimizationLevel.O1
    assert ascend_0_23.default_graphs(config) is None
