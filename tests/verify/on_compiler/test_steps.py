"""Each step of `verify --compile` on kernels that are right and on kernels that are broken on purpose.

`tests/verify/test_compiled.py` runs this file in the environment that has the compiler, without `tests/conftest.py`,
which switches Triton's interpreter on.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_gptoss.cli import main
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import TRITON_ASCEND, Priority, Range, accepts, load_kernels, register_kernel
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import packed
from npu_gptoss.verify import compiled
from npu_gptoss.verify.compiled import INTERPRETER, LOWERED, ascend_kernels, verify_compiled
from npu_gptoss.verify.runner import Report

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ascendnpuir") is None, reason="needs Huawei's compiler: make setup-ascend-compiler"
)
SOURCE = Path(packed.__file__).with_name("triton_ascend.py").read_text()
numbers = itertools.count()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The report of our kernel with a change of its source, of three calls."""
    load_kernels()
    check = compiled.CHECKS["moe.expand"]
    few = dataclasses.replace(check, calls=lambda spec: itertools.islice(check.calls(spec), 3))
    monkeypatch.setitem(compiled.CHECKS, "moe.expand", few)
    monkeypatch.syspath_prepend(tmp_path)
    name = "moe.expand.changed"

    def report(old: str, new: str, most: float = packed.MOST_IN_A_QUARTER, mutate: bool = False) -> Report:
        assert old in SOURCE
        module = f"changed_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(SOURCE.replace(old, new))
        importlib.invalidate_caches()
        registry.kernels.pop(name, None)
        register_kernel(
            packed.EXPAND,
            name=name,
            solution="changed",
            capability=TRITON_ASCEND,
            signatures=(accepts(out="bfloat16"),),
            traits={"quarter": Range(most=most)},
            priority=Priority.PERFORMANT,
            function=f"{module}:expand",
            summary="for a test",
        )
        (target,) = ascend_kernels(name)
        return verify_compiled(target, seed=0, cases=0, mutate=mutate)

    yield report
    registry.kernels.pop(name, None)


def failed(report: Report, step: str) -> set[str]:
    parts = [call.call.partition(", ") for call in report.calls if call.wrong]
    return {call for name, _, call in parts if name == step}


def test_a_scale_off_by_one_fails_where_numbers_are_seen(kernel, capsys):
    report = kernel("(scale - 1) * 2", "scale * 2")
    assert "every byte under every scale" in failed(report, INTERPRETER)
    assert failed(report, LOWERED) == failed(report, INTERPRETER)
    assert not report.ok
    assert not report.details, "a plan says nothing of a kernel that is wrong"
    name = report.target.name
    assert main(["verify", "--compile", name, "--cases", "0"]) == 1
    out = capsys.readouterr().out
    assert f"wrong: {name}" in out
    assert "     failed: lowered, every byte under every scale" in out
    assert f"again: npu-gptoss verify --compile {name}" in out


def test_a_tile_too_large_fails_where_the_memory_is_planned(kernel, monkeypatch):
    monkeypatch.setattr(packed, "rows_of", lambda columns: 8)
    report = kernel("", "", most=1 << 30)
    assert not any(call.wrong for call in report.calls)
    refusals = {one["program"]: one["plan"]["refusal"] for one in report.details["programs"]}
    assert "ub overflow" in refusals["expand_kernel(ROWS=8, COLUMNS=5760)"]
    fitting = [said for program, said in refusals.items() if program.endswith("ROWS=8, COLUMNS=256)")]
    assert fitting, "a slot or a tile of one is a constant of its program, too"
    assert not any(fitting)
    assert not report.ok


def test_a_mutation_that_nothing_notices_fails_the_kernel(kernel, monkeypatch):
    from npu_gptoss.verify.source_mutations import SourceMutation

    dead = SourceMutation(
        "nothing at all", SOURCE[SOURCE.index("def expand_kernel") : SOURCE.index("\n\n\ndef expand(")]
    )
    monkeypatch.setattr(compiled, "source_mutations", lambda source: (dead,))
    report = kernel("", "", mutate=True)
    assert [(m.name, m.ok) for m in report.mutations] == [("nothing at all", False)]
    assert not report.ok
    monkeypatch.setitem(compiled.EQUIVALENT, ("expand_kernel", "nothing at all"), "it is the kernel")
    assert kernel("", "", mutate=True).ok


def test_a_kernel_that_never_ends_and_one_that_dies_are_seen(monkeypatch):
    monkeypatch.setattr(compiled, "SECONDS", 1)

    def endless() -> str:
        while True:
            pass

    assert compiled._in_a_child(endless) == "it does not end within 1 s"
    assert compiled._in_a_child(lambda: sys.exit(3)) == "it ends its process with 1"
    assert compiled._in_a_child(lambda: "a call") == "a call"


def test_no_step_runs_under_triton_s_own_switch(monkeypatch):
    """With it every launch is interpreted: the second step would show nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compiled.compiler("tools").tools.cache_clear()
    with pytest.raises(InputError, match="TRITON_INTERPRET is set"):
        compiled.compiler("launches")


def test_write_outside_of_a_tensor_fails():
    from ascend_emulator.compiler import host, launches, tools

    tools.tools()
    from tests.verify.on_compiler import kernels

    values = torch.arange(8, dtype=torch.int32)
    made: dict[object, object] = {}
    with launches.launching(launches.lowered(made)):
        kernels.transposed[(1,)](values, out := torch.zeros(8, dtype=torch.int32), 0, ROWS=2, COLUMNS=4)
        assert out.view(4, 2).tolist() == values.view(2, 4).t().tolist()
        for offset, where in ((1, "behind"), (-1, "before")):
            with pytest.raises(host.OutOfBounds, match=f"out: the kernel wrote {where} it"):
                kernels.transposed[(1,)](values, torch.zeros(8, dtype=torch.int32), offset, ROWS=2, COLUMNS=4)
