"""The comparison bites: each known mistake of each check is caught, on the CPU and on the emulated operators."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from emulator.tests import machine
from npu_gptoss.cli import main
from npu_gptoss.kernels import load_kernels, platform_override
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.runner import KNOWN, Report, targets, verify
from tests import ascend_ops

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def report(check: str) -> Report:
    """Of the plain torch kernel of an operation, or of the function, without random calls."""
    load_kernels()
    name = check if CHECKS[check].operation is None else f"{check}.small_ops"
    with platform_override("cpu", frozenset()):
        (target,), _ = targets(CPU, name)
        return verify(target, CPU, seed=0, cases=0, mutate=True)


@pytest.mark.parametrize("check", CHECKS)
def test_every_mistake_is_caught_in_every_dtype_that_shows_it(check: str) -> None:
    found = report(check)
    assert found.ok, [m for m in found.mutations if not m.ok] or [c for c in found.calls if c.lines][:3]
    shown = {mistake.name for mistake in found.mutations if mistake.shown}
    assert shown == {mistake.name for mistake in CHECKS[check].mutations}, "each of them in some call"


@pytest.mark.parametrize(
    ("operation", "cann"),
    [
        ("attention.paged", "8.3.rc1"),
        ("attention.write_kv", "8.3.rc1"),
        ("moe.route", "8.3.rc1"),
        ("moe.experts", "8.3.rc1"),
        ("moe.experts", "8.5"),
    ],
)
def test_ascend_kernels_pass_on_emulated_operators_and_mistakes_are_caught(operation: str, cann: str) -> None:
    load_kernels()
    with ascend_ops.ascend(cann), torch.inference_mode():
        (target,), _ = targets(CPU, f"{operation}.ascend")
        found = verify(target, CPU, seed=0, cases=2, mutate=True)
    assert found.ok, [call for call in found.calls if call.lines][:3]
    caught = {mistake.name for mistake in found.mutations if mistake.caught_by}
    # of packed weights, which this kernel does not take, and of the call in the ledger
    not_shown = ("high nibble", "scale exponent", "scale of the next row", "padding rows computed")
    assert caught == {m.name for m in CHECKS[operation].mutations if not m.name.startswith(not_shown)}
    known = [call.call for call in found.calls if call.state == KNOWN]
    assert known == {
        "attention.paged": ["lengths on the device with padding, all keys"],
        "moe.experts": ["padding rows of NaN"],
    }.get(operation, [])


@pytest.mark.emulated
def test_the_command_passes_on_the_emulated_910b() -> None:
    """With the real torch_npu and its dispatcher: the kernels that a 910B gets, and MXFP4 on the device."""
    command = ["-m", "npu_gptoss.cli", "verify", "--mutate", "--cases", "1"]
    run = machine.emulate(*command, "*.ascend", PYTHONPATH=str(ROOT))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "4 kernels on npu (ascend)" in run.stdout
    assert "window 129 for 128" in run.stdout
    assert run.stdout.endswith("all right\n")


@pytest.mark.cuda
def test_the_command_passes_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", "--mutate", "--device", "cuda", "--jobs", "8"])
    out = capsys.readouterr().out
    assert code == 0, out[-6000:]
    assert "attention.paged.triton_decode: " in out
    assert "NOT CAUGHT" not in out
