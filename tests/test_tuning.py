"""docs/tuning.md: what it counts is what the doctor and the tables of performance.md count."""

from __future__ import annotations

import re

from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.serving.ascend.sizes import BUDGET, STREAMS, most_sizes
from tests.markdown import ROOT

PAGE = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
COUNTED = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip().strip("|").split("|")]


def test_the_table_of_sizes_is_vllm_ascends_arithmetic() -> None:
    table = PAGE.partition("checked by tests/test_tuning.py -->")[2].strip().partition("\n\n")[0].splitlines()[2:]
    wanted = [
        [name, f"{most_sizes(layers)} sizes", *(str(most_sizes(layers, groups=1, aiv=aiv)) for aiv in (False, True))]
        for name, layers in (("20b", 24), ("120b", 36))
    ]
    assert [cells(line) for line in table] == wanted
    assert f"at most {BUDGET} of a card's {STREAMS}" in PAGE


def counted(part: str, path: str) -> list[str]:
    """The row of performance.md for 8 requests on one device."""
    return next(c for c in map(cells, COUNTED.splitlines()) if c[:3] == ["8", part, path])


def test_the_savings_are_those_that_were_counted() -> None:
    """Columns of performance.md: batch, part, path, operators, to device, to host, waits, MB, over the roofline."""
    for part in ("attention", "experts"):
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {part}") and "small_ops" in line)
        ours, article, small = (counted(part, path) for path in ("ours", "article", "small ops"))
        assert cells(line)[1:4] == [ours[3], ours[6], f"{float(ours[8]):.2f}"]
        instead = cells(line)[4]
        assert re.search(rf"article: {article[3]}\b.*, {float(article[8]):.2f};", instead), instead
        roof = re.search(r"waits, ([\d.]+)$", instead)[1]
        assert f"`small_ops`: {small[3]}, {small[6]} waits" in instead
        assert abs(float(roof) - float(small[8])) < 0.06


def test_the_steps_are_those_that_were_counted() -> None:
    def step(path: str) -> list[str]:
        return next(c for c in map(cells, COUNTED.splitlines()) if c[:2] == ["8", path])

    assert f"| `eager` | {step('ours, eager')[2]} operators |" in PAGE
    assert f"| {step('ours, piecewise')[3]} replays, and attention's" in PAGE
    full = step("ours, full decode graphs")
    assert f"| {full[3]} replay, {full[4]} updates |" in PAGE
    assert f"({step('ours, eager, TP=2')[5]} in a step of two layers" in PAGE


def test_the_kernels_that_it_names_are_registered() -> None:
    load_kernels()
    for line in PAGE.splitlines():
        if found := re.match(r"\| ((?:`\w+\.\w+`(?:, )?)+) \| (.*?) \|", line):
            for operation in re.findall(r"`(\w+\.\w+)`", found[1]):
                names = re.findall(r"`(triton\w*)`", found[2])
                assert names
                assert {f"{operation}.{name}" for name in names} <= set(registry.kernels), operation
