"""Write the tables of docs/doctor.md from the code; without --write, compare the two.

python scripts/docs/doctor_page.py --write
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.doctor.memory import preset_lines
from npu_gptoss.serving.releases import ASCEND_RELEASES, MADE_FOR, RELEASES, SILENT_DEFECTS, TORCH_OLDEST, Release
from scripts.docs.page_tables import Tables


def window() -> str:
    oldest, on_cpu = ".".join(map(str, TORCH_OLDEST)), next(row for row in RELEASES if "cpu" in row.devices)

    def column(row: Release) -> tuple[str, ...]:
        named, (major, minor) = row.driver
        return (
            ", ".join(row.python_on_ascend),
            *(", ".join(found.releases) for found in (row.torch, row.torch_npu, row.vllm, row.vllm_ascend)),
            ", ".join(row.triton_ascend.releases) + ("" if row.launches_triton else ", for packed experts only"),
            ", ".join(row.cann.releases) + "; no alpha or beta build",
            f"{named}; from {major}.{minor} on",
        )

    names = ("Python", "torch", "torch-npu", "vLLM, built with `VLLM_TARGET_DEVICE=empty`", "vllm-ascend")
    names = (*names, "triton-ascend", "CANN and NNAL", "driver (Ascend HDK)")
    cpu = (", ".join(on_cpu.python), f"≥ {oldest}", "–", ", ".join(on_cpu.vllm.releases), *("–",) * 4)
    rows = zip(names, *map(column, ASCEND_RELEASES), cpu, strict=True)
    titles = [f"Ascend 910B, CANN {row.cann.recommended.removesuffix('.0')}" for row in ASCEND_RELEASES]
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


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
