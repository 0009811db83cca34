from __future__ import annotations

import copy
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
# soak/ has a form of its own (tests/soak/report.py), the others that of scripts in the tag research-2026-11
OTHERS = ("soak", "host", "agreement_0_33")
# of research/bench_serving.py, whose records no command of the package reads
SERVING = ("model", "weights", "layout", "streams", "output_tokens_per_s", "ttft_p99_ms", "itl_p99_ms")
COMMITTED = sorted(path for path in (ROOT / "docs/benchmarks").rglob("*.json") if path.parent.name not in OTHERS)


def decode_row(**changes: object) -> dict[str, object]:
    row = {
        "model": "20b",
        "weights": "mxfp4",
        "batch": 1,
        "context": 1024,
        "tpot_ms": 1.5,
        "steps": 128,
        "floor_ms": 0.78,
        "bytes": 3_740_000_000,
        "flops": 7_000_000_000,
        "TBps": 2.49,
        "TFLOPs": 4.67,
        "percent_of_floor": 52.0,
        "tokens_per_s": 666.7,
    }
    return {**row, **changes}


def document(*rows: dict[str, object]) -> dict[str, object]:
    return records.document(
        "decode",
        torch.device("cpu"),
        rows or [decode_row()],
        definitions={"tpot_ms": "mean time of a step"},
        ceilings=[H200],
        price_per_hour=3.0,
        settings={"steps": 128},
    )


def test_a_file_says_what_ran_where_and_when(tmp_path):
    records.write(tmp_path / "deeper" / "decode.json", document())
    content = json.loads((tmp_path / "deeper" / "decode.json").read_text())
    assert records.problems(content) == []
    assert content["engine"] == "npu_gptoss"
    assert content["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", content["versions"]["commit"])
    assert content["machine"]["device"] == "CPU"
    assert content["ceilings"] == {"H200 nominal": {"TBps": 4.8, "TFLOPs": 790.0}}
    assert content["date"][:2] == "20"


def test_a_file_says_which_kernels_were_chosen_by_hand(monkeypatch):
    """Two files of one machine and commit would else differ for no reason that they tell."""
    for name in os.environ:
        if name.startswith("NPU_GPTOSS_"):
            monkeypatch.delenv(name)
    assert document()["environment"] == {}
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "small_ops")
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_ROUTE", "")
    monkeypatch.setenv("NPU_GPTOSS_DISABLE_PLUGINS", "1")
    monkeypatch.setenv("ASCEND_EMULATOR_VENV", "/a/path/of/this/machine")
    want = {"NPU_GPTOSS_DISABLE_PLUGINS": "1", "NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}
    assert document()["environment"] == want


MISTAKES = {
    "no record": (lambda c: c["records"].clear(), "at least one record"),
    "another kind": (lambda c: c.update(what="speed"), "what must be one of decode"),
    "no definitions": (lambda c: c.pop("definitions"), "definitions is missing"),
    "another schema": (lambda c: c.update(schema=2), "schema must be 1"),
    "NaN": (lambda c: c["records"][0].update(tpot_ms=float("nan")), "tpot_ms must be a finite number above 0"),
    "no time": (lambda c: c["records"][0].update(tpot_ms=0.0), "tpot_ms must be a finite number above 0"),
    "half a batch": (lambda c: c["records"][0].update(batch=0.5), "batch must be a whole number from 1"),
    "True for 1": (lambda c: c["records"][0].update(batch=True), "batch must be a whole number from 1"),
    "a share that does not follow": (lambda c: c["records"][0].update(percent_of_floor=80.0), "its numbers give 52.0"),
    "seconds for milliseconds": (lambda c: c["records"][0].update(floor_ms=0.00078), "its numbers give 0.1"),
    "twice the same": (lambda c: c["records"].append(decode_row()), "record 1: repeats .*1, 1024"),
    "no object": (lambda c: c.update(records=["fast"]), "record 0: expected an object, got 'fast'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_file_is_told_and_not_written(name, tmp_path):
    content = document()
    change, message = MISTAKES[name]
    change(content)
    with pytest.raises(AssertionError, match=message):
        records.write(tmp_path / "decode.json", content)
    assert list(tmp_path.iterdir()) == []


def test_a_peers_number_stands_beside_the_same_point_and_no_other():
    others = ({"batch": 8}, {"weights": "bf16"}, {"layout": "tp2"}, {"layout": "ep2"})
    ours = [decode_row(), *(decode_row(**change) for change in others)]
    assert records.problems(document(*ours)) == []
    peer = {"engine": "vLLM 0.25.1", "records": [decode_row(tpot_ms=3.0), decode_row(batch=32, tpot_ms=4.0)]}
    beside = records.beside(ours, peer, "decode")
    assert beside[0]["peer"] == {"engine": "vLLM 0.25.1", "tpot_ms": 3.0, "times_as_long": 2.0}
    assert [row["peer"] for row in beside[1:]] == [None] * len(others), "a peer that names no layout is of one GPU"
    assert "peer" not in ours[0]


def test_a_peers_kernel_stands_beside_all_of_ours_of_the_same_case():
    case = {"operation": "attention.paged", "case": "prefill full 8192"}
    ours = [{**case, "kernel": name, "us": us} for name, us in (("triton", 2000.0), ("small_ops", 4000.0))]
    peer = {"engine": "vLLM 0.25.1", "records": [{**case, "kernel": "FlashAttention-3", "us": 1000.0}]}
    assert [row["peer"]["times_as_long"] for row in records.beside(ours, peer, "kernel")] == [0.5, 0.25]
    other = [{**ours[0], "case": "prefill window 8192"}]
    assert records.beside(other, peer, "kernel")[0]["peer"] is None


def test_a_peers_file_needs_the_keys_and_the_number_only(tmp_path):
    file = tmp_path / "peer.json"
    point = {"model": "20b", "weights": "mxfp4", "prompt_tokens": 8192, "prefill_s": 0.117}
    file.write_text(json.dumps({"what": "prefill", "engine": "vLLM 0.25.1", "records": [point]}))
    assert records.read_peer(file, "prefill")["records"] == [point]
    with pytest.raises(InputError, match="records of decode, got 'prefill'"):
        records.read_peer(file, "decode")
    lacking = copy.deepcopy(point)
    del lacking["prefill_s"]
    file.write_text(json.dumps({"what": "prefill", "engine": "vLLM 0.25.1", "records": [point, lacking]}))
    with pytest.raises(InputError, match="record 1: lacks prefill_s"):
        records.read_peer(file, "prefill")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefill_s": None}, "record 0: prefill_s must be a finite number above 0, got None"),
        ({"prefill_s": "0.1"}, "record 0: prefill_s must be a finite number above 0, got '0.1'"),
        ({"prompt_tokens": "8192"}, "record 0: prompt_tokens must be a whole number from 1, got '8192'"),
    ],
)
def test_what_cannot_be_computed_with_is_told_when_the_file_is_read(changed, message, tmp_path):
    """A peer's file is read before hours of measuring, and laid beside them after."""
    point = {"model": "20b", "weights": "mxfp4", "prompt_tokens": 8192, "prefill_s": 0.117, **changed}
    content = {"what": "prefill", "engine": "vLLM", "records": [point], "machine": {}, "versions": {}, "date": ""}
    file = tmp_path / "peer.json"
    file.write_text(json.dumps(content))
    for read in (records.read, lambda file: records.read_peer(file, "prefill")):
        with pytest.raises(InputError, match=re.escape(message)):
            read(file)


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.name)
def test_committed_records_can_be_read_without_asking(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("engine") == records.OURS:
        assert records.problems(content) == []
    else:
        needed = SERVING if content["what"] == "serving" else None
        assert records.read_peer(file, content["what"], needed=needed)["versions"]
    assert content["machine"]
    assert content["definitions"]
