"""Records as Markdown tables."""

from __future__ import annotations

from pathlib import Path

import torch

from npu_gptoss.bench import records
from npu_gptoss.cli import main

POINT = {"model": "20b", "weights": "mxfp4"}


def written(path: Path, kind: str, row: dict[str, object], **changes: object) -> str:
    shared = {"date": "2026-11-22T01:02:03+00:00", "versions": {"torch": "2.11.0"}, "machine": {"device": "H200"}}
    content = {**records.document(kind, torch.device("cpu"), {}, [], 3.0, {}), "records": [{**POINT, **row}]}
    records.write({**content, **shared, **changes}, path)
    return str(path)


def test_layouts_of_one_machine_share_a_table_and_other_machines_do_not(tmp_path, capsys):
    one = {"batch": 8, "context": 1024, "tpot_ms": 4.0, "tokens_per_s": 2000.0, "dollars_per_million_tokens": 0.4166666}
    two = {**one, "layout": "tp2", "tpot_ms": 2.0, "dollars_per_million_tokens": 0.42}
    peer = {"batch": 8, "context": 1024, "tpot_ms": 5}
    prompt = {"layout": "ep2", "prompt_tokens": 8192, "prefill_s": 0.07, "percent_of_floor": 61.25}
    files = [
        written(tmp_path / "1.json", "decode", one),
        written(tmp_path / "2.json", "decode", peer, engine="vLLM", dollars_per_gpu_hour=None),
        written(tmp_path / "3.json", "decode", two),
        written(tmp_path / "4.json", "prefill", prompt),
    ]
    assert main(["bench", "table", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "npu_gptoss on H200, 2026-11-22, torch 2.11.0; a GPU hour at $3.00: decode",
        "",
        "| model | weights | layout | batch | context | ms a token | tokens/s | $ a million tokens |",
        "|---|---|---|---|---|---|---|---|",
        "| 20b | mxfp4 | tp1 | 8 | 1024 | 4 | 2000 | 0.4167 |",
        "| 20b | mxfp4 | tp2 | 8 | 1024 | 2 | 2000 | 0.42 |",
        "",
        "vLLM on H200, 2026-11-22, torch 2.11.0: decode",
        "",
        "| model | weights | layout | batch | context | ms a token |",
        "|---|---|---|---|---|---|",
        "| 20b | mxfp4 | tp1 | 8 | 1024 | 5 |",
        "",
        "npu_gptoss on H200, 2026-11-22, torch 2.11.0; a GPU hour at $3.00: prefill",
        "",
        "| model | weights | layout | prompt_tokens | s to the first token | % of the floor |",
        "|---|---|---|---|---|---|",
        "| 20b | mxfp4 | ep2 | 8192 | 0.07 | 61.25 |",
        "",
    ]
