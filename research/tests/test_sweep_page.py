"""docs/benchmarking.md shows the committed sweeps, all of them, and nothing that was typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu_gptoss.bench import records
from research import sweep_page
from research.sweep_page import FOLDER, KINDS, PAGE, TABLES, measured
from scripts.docs.page_tables import ROOT

SWEEPS = sorted(FOLDER.glob("sweep_*"))


def test_the_page_shows_the_committed_sweeps() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert TABLES.written(text) == text, "out of date: python research/sweep_page.py --write"


@pytest.mark.parametrize("folder", SWEEPS, ids=lambda folder: folder.name)
def test_a_committed_sweep_can_be_read_without_asking(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    assert {file.stem for file in files} <= set(KINDS)
    assert files
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert content["what"] == file.stem
        assert records.problems(content) == []


def write(folder: Path, kind: str, row: dict[str, object], **changes: object) -> None:
    content = {"what": kind, "engine": "npu_gptoss", "machine": {"device": "H200"}, "versions": {"torch": "2.11.0"}}
    content |= {"date": "2026-11-22T01:00:00", "dollars_per_gpu_hour": 3.0, "records": [row], **changes}
    folder.mkdir(exist_ok=True)
    (folder / f"{kind}.json").write_text(json.dumps(content))


def test_tables_pictures_and_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(tmp_path) == "\nNothing has been measured yet."
    monkeypatch.setattr(sweep_page, "ROOT", tmp_path)
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    row = {"model": "20b", "weights": "mxfp4", "layout": "ep2", "dollars_per_million_tokens": 0.5}
    decode = {**row, "projections": "bf16", "batch": 8, "context": 1024, "tpot_ms": 2.0}
    write(folder / "sweep_20b", "decode", decode, not_measured={"ep4": "needs 4 GPUs"}, note="an early run")
    write(folder / "sweep_20b", "prefill", {**row, "prompt_tokens": 8192, "prefill_s": 0.1})
    (folder / "sweep_20b" / "decode_cost.svg").write_text("<svg/>")
    alone = {**row, "layout": "tp1", "prompt_tokens": 4096, "prefill_s": 0.3}
    write(folder / "sweep_120b", "prefill", alone)
    lines = measured(folder).splitlines()
    assert lines.index("| tp1 | 0.300 s, $0.500 |") < lines.index("| ep2 | 0.100 s, $0.500 |")
    where = "[prefill.json](benchmarks/sweep_20b/prefill.json), [decode.json](benchmarks/sweep_20b/decode.json)"
    assert f"From {where}. Of it: an early run." in lines
    assert lines.index("| ep2 | 0.100 s, $0.500 |") < lines.index("| 8 | 500 tok/s, $0.500 |")
    assert "ep4: needs 4 GPUs." in lines
    assert lines[-1] == "![decode cost](benchmarks/sweep_20b/decode_cost.svg)"
