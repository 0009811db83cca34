"""Write the tables of docs/doctor.md from the code; without --write, compare the two.

python scripts/docs/doctor_page.py --write
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.doctor.memory import preset_lines
from npu_gptoss.serving.lines import ASCEND_LINES, LINES, MADE_FOR, SILENT_DEFECTS, TORCH_OLDEST, Line
from scripts.docs.page_tables import Tables


def window() -> str:
    oldest, on_cpu = ".".join(map(str, TORCH_OLDEST)), next(line for line in LINES if "cpu" in line.devices)

    def column(line: Line) -> tuple[str, ...]:
        named, (major, minor) = line.driver
        return (
            ", ".join(line.python_on_ascend),
            *(", ".join(found.releases) for found in (line.torch, line.torch_npu, line.vllm, line.vllm_ascend)),
            ", ".join(line.triton_ascend.releases) if line.triton_ascend else "for packed experts only",
            ", ".join(line.cann.releases) + "; no alpha or beta build",
            f"{named}; from {major}.{minor} on",
            ", ".join(f"`{name}={value}`" for name, value, _ in line.variables) or "–",
        )

    names = ("Python", "torch", "torch-npu", "vLLM, built with `VLLM_TARGET_DEVICE=empty`", "vllm-ascend")
    names = (*names, "triton-ascend", "CANN and NNAL", "driver (Ascend HDK)", "variables")
    cpu = (", ".join(on_cpu.python), f"≥ {oldest}", "–", ", ".join(on_cpu.vllm.releases), *("–",) * 5)
    rows = zip(names, *map(column, ASCEND_LINES), cpu, strict=True)
    titles = [f"Ascend 910B, CANN {line.cann.recommended.removesuffix('.0')}" for line in ASCEND_LINES]
    head = ["", *titles, "CPU"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def made_for() -> str:
    rows = [(f"{major}.{minor}", *releases) for (major, minor), releases in MADE_FOR.items()]
    lines = ["| CANN | vllm-ascend made for it | this package |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {cann} | {first} to {last} | serves on none of it |" for cann, first, last in rows)]
    )


def silent() -> str:
    rows = [(".".join(map(str, first)), ".".join(map(str, last)), what) for first, last, what in SILENT_DEFECTS]
    lines = ["| vllm-ascend | gpt-oss there |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {'to' if first == '0.0' else f'{first} to'} {last} | {what} |" for first, last, what in rows)]
    )


def presets() -> str:
    return "\n".join(
        textwrap.fill(f"* {line}.", 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in preset_lines(16384)
    )


TABLES = Tables(
    script="scripts/docs/doctor_page.py",
    page="docs/doctor.md",
    tables={"window": window, "made-for": made_for, "silent": silent, "presets": presets},
)


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
