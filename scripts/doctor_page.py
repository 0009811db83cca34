"""Write the tables of docs/doctor.md from the code; without --write, say whether they are up to date.

python scripts/doctor_page.py --write
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss import supported
from npu_gptoss.doctor.checks import CHECKS
from npu_gptoss.doctor.memory import preset_lines

PAGE = Path(__file__).resolve().parents[1] / "docs/doctor.md"


def checks() -> str:
    lines = ["| check | looks at | when it is not well |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{check.name}` | {check.looks_at} | {check.remedy} |" for check in CHECKS)])


def window() -> str:
    oldest = ".".join(map(str, supported.TORCH_OLDEST))
    rows = [
        ("Python", ", ".join(supported.PYTHON_ON_ASCEND), ", ".join(supported.PYTHON)),
        ("torch", ", ".join(supported.TORCH_ON_ASCEND.releases), f"≥ {oldest}"),
        ("torch-npu", ", ".join(supported.TORCH_NPU.releases), "–"),
        ("vLLM, built with `VLLM_TARGET_DEVICE=empty`", *[", ".join(supported.VLLM.releases)] * 2),
        ("vllm-ascend", ", ".join(supported.VLLM_ASCEND.releases), "–"),
        ("CANN and NNAL", ", ".join(supported.CANN.releases) + "; no alpha build", "–"),
        (
            "driver (Ascend HDK)",
            f"{supported.DRIVER}; from {supported.DRIVER_OLDEST[0]}.{supported.DRIVER_OLDEST[1]} on",
            "–",
        ),
    ]
    return "\n".join(["| | Ascend 910B | CPU |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def presets() -> str:
    return "\n".join(f"* {line}." for line in preset_lines(16384))


TABLES = {"checks": checks, "window": window, "presets": presets}


def written(text: str) -> str:
    """The page with every table anew. Raises ValueError when a table's place is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}, by scripts/doctor_page.py: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.S)
        parts = pattern.split(text)
        count = len(parts) // 3
        if count != 1:
            raise ValueError(
                f"docs/doctor.md should have one place for {name}, between {begin} and {end}; it has {count}"
            )
        before, begin, end, after = parts
        text = f"{before}{begin}\n{table()}\n\n{end}{after}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    args = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if args.write:
        temporary = PAGE.with_suffix(".new")
        temporary.write_text(after, encoding="utf-8")
        temporary.replace(PAGE)
        return 0
    print("up to date" if before == after else "out of date: python scripts/doctor_page.py --write")
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
