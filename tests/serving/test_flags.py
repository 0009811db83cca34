"""Flags of public recipes start a server, or are refused in one sentence, on each stack."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.tiny.checkpoint import write_tiny
from scripts.setup.environments import ENVIRONMENTS
from tests.serving.flag_lines import ROWS, STACKS
from tests.serving.flags import ASIDE, OURS, STARTS, USAGE, VLLMS

ROOT = Path(__file__).resolve().parents[2]
LETTERS = {"S": STARTS, "A": ASIDE, "R": OURS, "V": VLLMS, "U": USAGE}
# settings whose refusal names another one than the flag: what vLLM makes of the flag, or the field that it replaces
NAMED = {"--task": "--runner", "--convert": "--runner", "--hf-overrides": ""}
MARKS = {
    "cpu": [pytest.mark.serving],
    "8.3": [pytest.mark.emulated, pytest.mark.slow],
    "9.1": [pytest.mark.emulated, pytest.mark.slow],
    "cuda": [pytest.mark.vllm033, pytest.mark.slow],
}


NGRAMS = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'"""


def mode(name: str) -> str:
    return f"""--compilation-config '{{"cudagraph_mode": "{name}"}}'"""


GRAPHS = {  # on CANN 9.1; n-grams turn asynchronous scheduling off
    "": "FULL_DECODE_ONLY",
    "--no-async-scheduling": "FULL_DECODE_ONLY",
    "-O0": "NONE",
    "-O1": "PIECEWISE",
    mode("FULL_AND_PIECEWISE"): "FULL_DECODE_ONLY",
    f"{mode('FULL_AND_PIECEWISE')} --no-async-scheduling": "FULL_AND_PIECEWISE",
    NGRAMS: "FULL_AND_PIECEWISE",
    f"{NGRAMS} --tensor-parallel-size 2": "FULL_AND_PIECEWISE",
    f"{NGRAMS} --enforce-eager": "NONE",
    f"{NGRAMS} -O0": "NONE",
    f"{NGRAMS} --compilation-config.mode 0": "FULL_DECODE_ONLY",  # no pieces without compilation
    f"{NGRAMS} {mode('FULL_AND_PIECEWISE')}": "FULL_AND_PIECEWISE",
    f"{NGRAMS} {mode('FULL_DECODE_ONLY')}": "FULL_DECODE_ONLY",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flags") / "tiny"
    write_tiny(path, mxfp4=True)
    return path


def place(stack: str) -> tuple[str, dict[str, str]]:
    """The Python of a stack, and its variables."""
    if stack == "cpu":
        pytest.importorskip("vllm")
        return sys.executable, dict(os.environ)
    if stack == "cuda":
        python = ROOT / ENVIRONMENTS["vllm033"].folder / "bin/python"
        if not python.exists():
            pytest.skip("vLLM 0.33 is not set up; make test")
        return str(python), os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    from ascend_emulator.launch import Machine, environment

    from emulator.tests.machine import venv

    machine = Machine(stack if stack == "9.1" else "8.3.rc1", devices=8)
    return str(venv(machine) / "bin/python"), environment(machine, venv(machine))


@functools.cache  # one process for a stack, which takes seconds to import
def answers(stack: str, model: Path) -> dict[str, dict[str, Any]]:
    """What becomes of each line of flags."""
    flags = [line for _, line in ROWS] + (list(GRAPHS) if stack == "9.1" else [])
    python, variables = place(stack)
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    variables.pop("NPU_GPTOSS", None)
    command = [python, "-m", "tests.serving.flags", str(model)]
    done = subprocess.run(command, cwd=ROOT, env=variables, input=json.dumps(flags), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(flags, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("stack", [pytest.param(stack, marks=MARKS[stack]) for stack in STACKS])
def test_flags_of_recipes_end_in_no_traceback(stack: str, model: Path) -> None:
    """And each starts, or is refused, as the table says."""
    found, wrong = answers(stack, model), {}
    for letters, line in ROWS:
        told = found[line]
        faults = [told["verdict"]] if told["verdict"] != LETTERS[letters[STACKS.index(stack)]] else []
        said = told["said"]
        if said and told["verdict"] != USAGE and ("\n" in said or not re.search(r"[\w`)]\.$", said)):
            faults.append(f"no sentence: {said}")
        unnamed = [field for field in told["fields"] if field.startswith("--") and not _names(line, field)]
        if unnamed:
            faults.append(f"names {unnamed}, which no flag of the line is")
        if faults:
            wrong[line] = [*faults, said]
    assert wrong == {}


@pytest.mark.parametrize("stack", [pytest.param("9.1", marks=MARKS["9.1"])])
def test_drafts_of_any_number_get_graphs_for_their_steps(stack: str, model: Path) -> None:
    found = answers(stack, model)
    assert {line: found[line].get("graphs", found[line]) for line in GRAPHS} == GRAPHS


def _names(line: str, field: str) -> bool:
    return field in line or any(flag in line and other in ("", field) for flag, other in NAMED.items())
