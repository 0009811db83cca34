"""Ascend's Triton kernels by Huawei's compiler: run in the environment that has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.cli import main
from npu_gptoss.verify.source_mutations import source_mutations
from scripts.setup.environments import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ENVIRONMENTS["ascend-compiler"].folder / "bin"


def with_compiler(function: Any) -> Any:
    here = pytest.mark.skipif(not BIN.exists(), reason="the compiler is not set up: make setup-ascend-compiler")
    return pytest.mark.ascend_compiler(pytest.mark.slow(here(function)))


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the switch that makes every launch of this process's tests an interpreted one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [str(BIN / program), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@with_compiler
@pytest.mark.parametrize("mutate", [[], pytest.param(["--mutate"], marks=pytest.mark.long)], ids=["", "mutated"])
def test_every_kernel_of_ascend_in_triton_passes_all_steps(tmp_path: Path, mutate: list[str]) -> None:
    done = run("npu-gptoss", "verify", "--compile", *mutate, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rotate, found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert rotate["kernel"] == "dense.rotate_write.triton_ascend"
    assert any("HEADS=64, KV_HEADS=8, DIM=64" in one["program"] for one in rotate["programs"]), "gpt-oss's own"
    assert found["kernel"] == "moe.expand.triton_ascend"
    steps = [call["call"].partition(", ")[0] for call in found["calls"]]
    assert steps.count("lowered") == steps.count("interpreter") > 8
    programs = {one["program"]: one["plan"] for one in found["programs"]}
    for sizes in ("ROWS=2, COLUMNS=5760", "ROWS=4, COLUMNS=2880"):  # gate and up, down of gpt-oss
        plan = programs[f"expand_kernel({sizes})"]
        assert plan["memory"]["ub"] <= 196608
        assert "enable-auto-multi-buffer" not in plan["without"], "loads and stores would wait for each other"
        assert plan["scalar"] == 1, "only the expert's id is read as a single number"
        rows, columns = (int(number) for number in re.findall(r"=(\d+)", sizes))
        vectors = {int(elements): count for elements, count in plan["vectors"].items()}
        # docs/performance.md predicts the time of packed experts from these two, and docs/verify.md names them
        assert vectors == {rows * columns: 19, columns: 7}
    if mutate:
        assert len(found["mistakes"]) > 50


@with_compiler
def test_steps_fail_on_kernels_broken_on_purpose() -> None:
    options = ["-q", "-p", "no:cacheprovider", "--noconftest"]
    done = run("python", "-m", "pytest", *options, "tests/verify/on_compiler")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 6
    assert "skipped" not in done.stdout


def test_without_the_compiler_the_command_names_the_set_up(capsys, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["verify", "--compile"]) == 2
    said = capsys.readouterr().err
    assert "make setup-ascend-compiler" in said
    assert main(["verify", "--compile", "attention"]) == 2
    names = "dense.rotate_write.triton_ascend, moe.expand.triton_ascend"
    assert f"names no kernel that is compiled for Ascend; such kernels are: {names}" in capsys.readouterr().err


def test_a_source_has_a_mutation_of_each_operator_number_and_function() -> None:
    source = "def f(x, N: tl.constexpr):\n    y = tl.maximum(x + 3, 0)\n    if y >= N:\n        tl.store(x, y << 1)\n"
    names = [mutation.name for mutation in source_mutations(source)]
    changed = [name.partition("  ->  ")[2] for name in names]
    assert changed == sorted(set(changed), key=changed.index), "each once"
    assert set(changed) == {
        "y = tl.minimum(x + 3, 0)",
        "y = tl.maximum(x - 3, 0)",
        "y = tl.maximum(x + 4, 0)",
        "y = tl.maximum(x + 3, 1)",
        "if y > N:",
        "tl.store(x, y >> 1)",
        "tl.store(x, y << 2)",
    }
