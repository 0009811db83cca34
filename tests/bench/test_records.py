"""Files of records: their content, rows that are refused, and committed files that must stay readable."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from npu_gptoss.bench import records
from npu_gptoss.bench.roofline import H200
from npu_gptoss.errors import InputError

ROOT = Path(__file__).parents[2]
COMMITTED = {path: json.loads(path.read_text()) for path in sorted((ROOT / "docs/benchmarks").rglob("*.json"))}
OF_BENCH = [
    path for path, content in COMMITTED.items() if isinstance(content, dict) and content.get("what") in records.KINDS
]
ROW = {"model": "20b", "weights": "mxfp4", "batch": 1, "context": 1024, "tpot_ms": 1.5, "steps": 128}


def document(*rows: object) -> records.Document:
    empty = records.document("decode", torch.device("cpu"), {"tpot_ms": "mean"}, [H200], 3.0, {"steps": 128})
    return {**empty, "records": list(rows)}


def test_file_has_engine_machine_versions_and_date(tmp_path):
    records.write(document(ROW), tmp_path / "deeper" / "decode.json")
    content = records.read(tmp_path / "deeper" / "decode.json")
    assert content["engine"] == "npu_gptoss"
    assert content["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", content["versions"]["commit"])
    assert content["machine"]["device"] == "CPU"
    assert content["ceilings"] == {"H200 nominal": {"TBps": 4.8, "TFLOPs": 790.0}}
    assert content["date"][:2] == "20"


def test_file_says_which_kernels_were_chosen_by_hand(monkeypatch):
    """Two files of one machine and commit would otherwise differ without a reason."""
    for name in os.environ:
        if name.startswith("NPU_GPTOSS_"):
            monkeypatch.delenv(name)
    want = {"NPU_GPTOSS_DISABLE_PLUGINS": "1", "NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}
    for name, value in {**want, "NPU_GPTOSS_KERNEL_MOE_ROUTE": "", "ASCEND_EMULATOR_VENV": "/this/machine"}.items():
        monkeypatch.setenv(name, value)
    assert document()["environment"] == want


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "tpot_ms": float("nan")}, "tpot_ms must be a finite number above 0, got nan"),
        ({**ROW, "tpot_ms": 0.0}, "tpot_ms must be a finite number above 0, got 0.0"),
        ({**ROW, "tpot_ms": "0.1"}, "tpot_ms must be a finite number above 0, got '0.1'"),
        ({**ROW, "tpot_p10_ms": "1.4"}, "tpot_p10_ms must be a finite number, got '1.4'"),
        ({**ROW, "batch": True}, "batch must be a whole number from 1, got True"),
        ({**ROW, "model": ""}, "model must be a text, got ''"),
        ("fast", "expected an object, got 'fast'"),
    ],
)
def test_row_without_its_key_or_time_is_refused(row, message, tmp_path):
    file = tmp_path / "decode.json"
    file.write_text(json.dumps(document(ROW, row)))
    with pytest.raises(InputError, match=re.escape(f"record 1: {message}")):
        records.read(file)


@pytest.mark.parametrize("file", OF_BENCH, ids=lambda file: file.name)
def test_committed_records_can_still_be_read(file):
    content = records.read(file)
    assert content["records"]
    assert content["definitions"]
    assert content["machine"]


def test_committed_records_are_found():
    assert {COMMITTED[path]["what"] for path in OF_BENCH} >= {"decode", "prefill"}
    assert len(OF_BENCH) >= 20
