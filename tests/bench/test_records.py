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


def decode_row(**changes: object) -> dict[str, object]:
    row = {"model": "20b", "weights": "mxfp4", "batch": 1, "context": 1024, "tpot_ms": 1.5, "steps": 128}
    return {**row, **changes}


def document(*rows: dict[str, object]) -> records.Document:
    return records.Document.measured(
        "decode",
        torch.device("cpu"),
        rows or [decode_row()],
        definitions={"tpot_ms": "mean time of a step"},
        ceilings=[H200],
        price_per_hour=3.0,
        settings={"steps": 128},
    )


def test_file_has_engine_machine_versions_and_date(tmp_path):
    document().write(tmp_path / "deeper" / "decode.json")
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
    assert document().environment == {}
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "small_ops")
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_ROUTE", "")
    monkeypatch.setenv("NPU_GPTOSS_DISABLE_PLUGINS", "1")
    monkeypatch.setenv("ASCEND_EMULATOR_VENV", "/a/path/of/this/machine")
    want = {"NPU_GPTOSS_DISABLE_PLUGINS": "1", "NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}
    assert document().environment == want


MISTAKES = {
    "NaN": (decode_row(tpot_ms=float("nan")), "tpot_ms must be a finite number above 0, got nan"),
    "no time": (decode_row(tpot_ms=0.0), "tpot_ms must be a finite number above 0, got 0.0"),
    "a text for a time": (decode_row(tpot_ms="0.1"), "tpot_ms must be a finite number above 0, got '0.1'"),
    "half a batch": (decode_row(batch=0.5), "batch must be a whole number from 1, got 0.5"),
    "True for 1": (decode_row(batch=True), "batch must be a whole number from 1, got True"),
    "no model": (decode_row(model=""), "model must be a text, got ''"),
    "no object": ("fast", "expected an object, got 'fast'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_row_without_its_key_or_time_is_neither_written_nor_read(name, tmp_path):
    """A peer's file is read before hours of measuring, and joined to them after."""
    row, message = MISTAKES[name]
    with pytest.raises(AssertionError, match=re.escape(f"record 1: {message}")):
        document(decode_row(), row).write(tmp_path / "decode.json")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "peer.json"
    content = {"what": "decode", "engine": "vLLM", "records": [row], "machine": {}, "versions": {}, "date": ""}
    file.write_text(json.dumps(content))
    for read in (records.read, lambda file: records.read_peer(file, "decode")):
        with pytest.raises(InputError, match=re.escape(f"record 0: {message}")):
            read(file)


def test_two_rows_of_one_point_are_not_written(tmp_path):
    with pytest.raises(AssertionError, match="two rows of decode have the same"):
        document(decode_row(), decode_row()).write(tmp_path / "decode.json")


def test_peer_is_beside_the_same_point_and_no_other():
    others = ({"batch": 8}, {"weights": "bf16"}, {"layout": "tp2"}, {"layout": "ep2"})
    ours = [decode_row(), *(decode_row(**change) for change in others)]
    peer = {"engine": "vLLM 0.25.1", "records": [decode_row(tpot_ms=3.0), decode_row(batch=32, tpot_ms=4.0)]}
    beside = records.beside(ours, peer, "decode")
    assert beside[0]["peer"] == {"engine": "vLLM 0.25.1", "tpot_ms": 3.0, "times_as_long": 2.0}
    assert [row["peer"] for row in beside[1:]] == [None] * len(others), "a peer that names no layout is of one GPU"
    assert "peer" not in ours[0]


def test_peer_kernel_is_beside_all_of_ours_of_the_same_case():
    case = {"operation": "attention.paged", "case": "prefill full 8192"}
    ours = [{**case, "kernel": name, "us": us} for name, us in (("triton", 2000.0), ("small_ops", 4000.0))]
    peer = {"engine": "vLLM 0.25.1", "records": [{**case, "kernel": "FlashAttention-3", "us": 1000.0}]}
    assert [row["peer"]["times_as_long"] for row in records.beside(ours, peer, "kernel")] == [0.5, 0.25]
    other = [{**ours[0], "case": "prefill window 8192"}]
    assert records.beside(other, peer, "kernel")[0]["peer"] is None


def test_peer_file_needs_the_keys_and_the_time_only(tmp_path):
    file = tmp_path / "peer.json"
    point = {"model": "20b", "weights": "mxfp4", "prompt_tokens": 8192, "prefill_s": 0.117}
    file.write_text(json.dumps({"what": "prefill", "engine": "vLLM 0.25.1", "records": [point]}))
    assert records.read_peer(file, "prefill")["records"] == [point]
    with pytest.raises(InputError, match="records of decode, got 'prefill'"):
        records.read_peer(file, "decode")
    file.write_text(json.dumps({"what": "prefill", "engine": "vLLM 0.25.1", "records": [{**point, "prefill_s": None}]}))
    with pytest.raises(InputError, match="record 0: prefill_s must be"):
        records.read_peer(file, "prefill")
    with pytest.raises(
        InputError, match=r"no.json: there is no such file; `npu-gptoss bench … --json FILE` writes one"
    ):
        records.read(tmp_path / "no.json")


@pytest.mark.parametrize("file", OF_BENCH, ids=lambda file: file.name)
def test_committed_records_can_still_be_read(file):
    content = records.read(file)
    assert content["records"]
    assert content["definitions"]
    assert content["machine"]


def test_committed_records_are_found():
    assert {records.KINDS[COMMITTED[path]["what"]] for path in OF_BENCH} >= {
        records.KINDS["decode"],
        records.KINDS["prefill"],
    }
    assert len(OF_BENCH) >= 20
