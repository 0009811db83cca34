"""The tables of speed and cost by layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from npu_gptoss.bench import records, tables
from npu_gptoss.cli import main

POINT = {"model": "20b", "weights": "mxfp4"}


def decode_row(layout: str | None, batch: int, tpot_ms: float, dollars: float) -> dict[str, object]:
    row = {**POINT, "batch": batch, "context": 8192, "tpot_ms": tpot_ms, "dollars_per_million_tokens": dollars}
    return {**row, **({} if layout is None else {"layout": layout})}


def prefill_row(layout: str, tokens: int, seconds: float, dollars: float) -> dict[str, object]:
    row = {**POINT, "layout": layout, "prompt_tokens": tokens, "prefill_s": seconds}
    return {**row, "dollars_per_million_tokens": dollars}


def test_the_prefill_table_has_layouts_by_lengths():
    rows = [prefill_row("tp2", 32768, 0.4, 0.02), prefill_row("tp2", 8192, 0.06, 0.0122)]
    rows += [prefill_row("tp1", 8192, 0.1141, 0.0116), prefill_row("ep2", 8192, 0.07, 0.0142)]
    assert tables.tables_of("prefill", rows)[2:] == [
        "| layout | 8192 tokens | 32768 tokens |",
        "|---|---|---|",
        "| tp1 | 0.114 s, $0.012 | – |",
        "| tp2 | 0.060 s, $0.012 | 0.400 s, $0.020 |",
        "| ep2 | 0.070 s, $0.014 | – |",
        "",
    ]


def test_the_decode_table_has_the_speed_of_one_user_and_not_of_the_batch():
    rows = [decode_row("tp4", 8, 2.0, 0.83), decode_row(None, 8, 4.0, 0.417), decode_row("tp4", 1, 1.25, 4.1667)]
    assert tables.tables_of("decode", rows)[2:] == [
        "| batch | tp1 | tp4 |",
        "|---|---|---|",
        "| 1 | – | 800 tok/s, $4.167 |",
        "| 8 | 250 tok/s, $0.417 | 500 tok/s, $0.830 |",
        "",
    ]


def write(path: Path, kind: str, row: dict[str, object], **changes: object) -> dict[str, object]:
    shared = {"date": "2026-11-22T01:02:03+00:00", "versions": {"torch": "2.11.0"}}
    content = {**records.document(kind, torch.device("cpu"), {}, [], 3.0, {}), "records": [row], **shared, **changes}
    records.write(content, path)
    return content


def test_each_table_is_under_its_own_machine(tmp_path, capsys):
    files = [tmp_path / name for name in ("prefill.json", "other.json", "decode.json", "tp2.json")]
    here, missing = {"device": "NVIDIA H200"}, {"tp4": "needs 4 GPUs"}
    first = write(files[0], "prefill", prefill_row("tp1", 8192, 0.1, 0.01), machine=here, not_measured=missing)
    other = decode_row("tp1", 1, 2.0, 1.0)
    del other["dollars_per_million_tokens"]
    write(files[1], "decode", other, machine={"device": "A100"}, engine="vLLM", dollars_per_gpu_hour=None)
    write(files[2], "decode", decode_row("tp1", 1, 1.0, 0.5), machine=here)
    write(files[3], "decode", decode_row("tp2", 1, 0.8, 0.8), machine=here)  # each layout is measured by itself
    assert main(["bench", "table", *map(str, files)]) == 0
    out = capsys.readouterr().out.splitlines()
    marks = [
        "npu_gptoss on NVIDIA H200, 2026-11-22, torch 2.11.0; a GPU hour at $3.00.",
        "| tp1 | 0.100 s, $0.010 |",
        "| 1 | 1000 tok/s, $0.500 | 1250 tok/s, $0.800 |",
        "vLLM on A100, 2026-11-22, torch 2.11.0.",
        "| 1 | 500 tok/s |",
        "tp4: needs 4 GPUs.",
    ]
    assert [line for line in out if line in marks] == marks
    files[0].write_text(json.dumps(first | {"what": "kernel"}))
    assert main(["bench", "table", str(files[0])]) == 2
    assert "records of prefill, decode, got 'kernel'" in capsys.readouterr().err
