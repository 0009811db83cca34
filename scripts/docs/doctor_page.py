"""Write the tables of docs/doctor.md from the code; without --write, say whether they are up to date.

python scripts/docs/doctor_page.py --write
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.doctor.memory import preset_lines
from npu_gptoss.serving.lines import DRIVER, DRIVER_OLDEST, SILENT_DEFECTS, TORCH_OLDEST, ascend_line
from scripts.docs.page_tables import Tables


def window() -> str:
    oldest = ".".join(map(str, TORCH_OLDEST))
    line = ascend_line()
    rows = [
        ("Python", ", ".join(line.python_on_ascend), ", ".join(line.python)),
        ("torch", ", ".join(line.torch.releases), f"≥ {oldest}"),
        ("torch-npu", ", ".join(line.torch_npu.releases), "–"),
        ("vLLM, built with `VLLM_TARGET_DEVICE=empty`", *[", ".join(line.vllm.releases)] * 2),
        ("vllm-ascend", ", ".join(line.vllm_ascend.releases), "–"),
        ("CANN and NNAL", ", ".join(line.cann.releases) + "; no alpha build", "–"),
        (
            "driver (Ascend HDK)",
            f"{DRIVER}; from {DRIVER_OLDEST[0]}.{DRIVER_OLDEST[1]} on",
            "–",
        ),
    ]
    return "\n".join(["| | Ascend 910B | CPU |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def silent() -> str:
    rows = [(".".join(map(str, first)), ".".join(map(str, last)), what) for first, last, what in SILENT_DEFECTS]
    lines = ["| vllm-ascend | gpt-oss there |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {'to' if first == '0.0' else f'{first} to'} {last} | {what} |" for first, last, what in rows)]
    )


def presets() -> str:
    return "\n".join(f"* {line}." for line in preset_lines(16384))


TABLES = Tables(
    script="scripts/docs/doctor_page.py",
    page="docs/doctor.md",
    tables={"window": window, "silent": silent, "presets": presets},
)


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
