"""Runs cases inside the emulated environment, each in its own process, and reports them one by one.

`on_device/runner.py` runs a file of `on_device/` with the environment's Python. Tests are parametrised over its
functions `case_…` and the tables of them, found without importing the file, which needs torch_npu.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from ascend_emulator.launch import EmulationError, Machine, environment, find_venv

FOLDER = Path(__file__).parent / "on_device"
ROOT = Path(__file__).parents[2]


def cases_of(file: str | Path) -> list[str]:
    tree = ast.parse((FOLDER / file).read_text())
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    named += [key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if _is_text(key)]
    return [name for name in named if name.startswith("case_")]


def _is_text(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def venv(machine: Machine | None = None) -> Path:
    """The environment of the machine's stack, or of the default machine's."""
    try:
        return find_venv(stack=(machine or Machine()).stack)
    except EmulationError as error:
        pytest.skip(str(error))


def emulate(
    *command: str, machine: Machine | None = None, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python command…` of the emulated environment on the emulated machine, with this checkout's packages."""
    place = venv(machine)
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'emulator'}", **variables}
    return subprocess.run(
        [str(place / "bin/python"), *command],
        env={**environment(machine or Machine(), place), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@functools.cache
def _results(file: str | Path, machine: Machine) -> Mapping[str, dict[str, object]]:
    run = emulate(str(FOLDER / "runner.py"), str(FOLDER / file), machine=machine, ASCEND_EMULATOR_HANG_SECONDS="1")
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"no case of {file} was run:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return {line["case"]: line for line in lines}


def check(file: str | Path, case: str, machine: Machine | None = None) -> None:
    """Fails with the traceback of the case."""
    venv(machine)
    result = _results(file, machine or Machine()).get(case)
    assert result is not None, f"{case} of {file} was not run"
    assert result["ok"], result["text"]
