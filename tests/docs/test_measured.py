"""Measured tables hold the numbers of the records named below them, and the picture is drawn from its records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from scripts.docs import speed_picture
from tests.markdown import ROOT

PAGES = ("docs/performance.md", "docs/benchmarking.md")
# by a column's unit: the fields of records that it shows, and by how much they are divided
FIELDS = {
    "ms": (r"(tpot|floor|itl_median|itl_p99|ttft_median|ttft_p99)_ms", 1.0),
    "s": (r"prefill_s", 1.0),
    "µs": (r"(floor_)?us", 1.0),
    "tok/s": (r"output_tokens_per_s|tokens_per_s", 1.0),
    "TFLOP/s": (r"TFLOPs", 1.0),
    "$": (r"dollars_per_million_tokens", 1.0),
}
Cell = tuple[str, str, list[str]]  # the number as it is written, its unit, the record files


def tables(text: str) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Tables with a line `Records:` behind them: rows of cells, and the record files."""
    for found in re.finditer(r"((?:^\|.*\n)+)\nRecords: ((?:.+\n)+)", text, re.M):
        files = re.findall(r"`([\w/.]+\.json)`", found[2])
        if "the same paths in `peer_0_33/`" in " ".join(found[2].split()):
            files += [file.replace("inside_vllm_0_33/", "peer_0_33/") for file in files]
        yield [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in found[1].splitlines()], files


def measured(text: str) -> list[Cell]:
    """The numbers of these tables with a unit, in the column's head or in the cell."""
    cells = []
    for (head, _, *rows), files in tables(text):
        for row in rows:
            for name, cell in zip(head, row, strict=True):
                column = re.search(r" (ms|s|µs|tok/s|TFLOP/s)$", name)
                if column:
                    cells += [(number, column[1], files) for number in re.findall(r"[\d.]*\d", cell)]
                cells += [(number, "$", files) for number in re.findall(r"\$([\d.]*\d)", cell)]
                cells += [(number, unit, files) for number, unit in re.findall(r"([\d.]*\d) (tok/s|s)\b", cell)]
    return cells


def is_recorded(cell: Cell) -> bool:
    number, unit, files = cell
    decimals = len(number.partition(".")[2])
    for file in files:
        for record in json.loads((ROOT / "docs/benchmarks" / file).read_text(encoding="utf-8"))["records"]:
            values = [value for name, value in record.items() if re.fullmatch(FIELDS[unit][0], name)]
            if unit == "s" and "floor_ms" in record:
                values.append(record["floor_ms"] / 1e3)
            if unit == "tok/s" and "tpot_ms" in record:
                values.append(1e3 / record["tpot_ms"])
            if any(f"{value:.{decimals}f}" == number for value in values):
                return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_of_a_page_are_in_their_records(page: str) -> None:
    cells = measured((ROOT / page).read_text(encoding="utf-8"))
    assert len(cells) > 80
    assert [cell for cell in cells if not is_recorded(cell)] == []


def test_ratios_follow_from_the_two_numbers_beside_them() -> None:
    compared = 0
    for (head, _, *rows), _ in tables((ROOT / PAGES[0]).read_text(encoding="utf-8")):
        for row in rows if "faster by" in head else ():
            place = head.index("faster by")
            ours, stock = (float(row[place + shift]) for shift in (-2, -1))
            assert max(ours, stock) / min(ours, stock) == pytest.approx(float(row[place].rstrip(" ×")), rel=0.01), row
            compared += 1
    assert compared == 36


@pytest.mark.parametrize("name", ["speed", "users"])
def test_the_picture_is_what_its_command_draws(name: str) -> None:
    file, draw = speed_picture.PICTURES[name]
    assert file.read_text(encoding="utf-8") == draw(), "python scripts/docs/speed_picture.py"
