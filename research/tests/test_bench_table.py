"""The tables of docs/performance.md say what the records say, and whether a goal was met follows from the numbers."""

from __future__ import annotations

import json

import pytest

from research.bench_rows import FOLDER, against
from research.bench_table import TABLES, decode_goal, load, render
from scripts.docs.page_tables import ROOT

HEADER = {
    "engine": "npu_gptoss",
    "machine": {"device": "NVIDIA H200"},
    "versions": {"torch": "2.11.0"},
    "date": "2026-11",
}


def decode(**changes: object) -> dict[str, object]:
    record = {
        "model": "20b",
        "weights": "mxfp4",
        "projections": "bf16",
        "batch": 8,
        "context": 1024,
        "tpot_ms": 3.0,
        "floor_ms": 1.9,
        "floor_uniform_ms": 1.95,
        "percent_of_floor": 63.3,
        "TBps": 3.1,
        "peer": {"engine": "vLLM 0.25.1", "tpot_ms": 4.985},
        "_": {**HEADER, "what": "decode", "file": "decode.json"},
    }
    return {**record, **changes}


def test_a_goal_is_met_or_missed_by_the_numbers():
    assert against(3.0, 3.12) == "met"
    assert against(3.3, 3.0) == "missed, 1.10 ×"
    assert against(3.0, None) == "–"


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({}, 1.6 * 1.95),
        ({"batch": 1}, 1.5),
        ({"batch": 1, "context": 8192}, 1.6),
        ({"batch": 1, "weights": "bf16"}, 2.2),
        ({"batch": 1, "model": "120b"}, 2.2),
        ({"batch": 2}, None),
        ({"batch": 128, "context": 8192}, None),
        ({"weights": "fp8"}, None),
        ({"projections": "fp8"}, None),
        ({"layout": "tp1"}, 1.6 * 1.95),
        ({"layout": "tp2"}, None),
        ({"_": {**HEADER, "machine": {"device": "NVIDIA H100 80GB HBM3"}}}, None),
    ],
)
def test_goals_are_those_set_before(changes, goal):
    assert decode_goal(decode(**changes)) == (goal if goal is None else pytest.approx(goal))


def test_a_row_holds_the_records_numbers_and_the_peers():
    text = render([decode()])
    assert "| 20b | mxfp4 | 8 | 1024 | **3.000** | 1.900 | 63 % | 3.10 | 4.985 | ≤ 3.12 | met |" in text
    assert "missed, 1.28 ×" in render([decode(tpot_ms=4.0)])
    assert "| – | ≤ 3.12 | met |" in render([decode(peer=None)])
    assert "[decode.json](benchmarks/decode.json): npu_gptoss on NVIDIA H200" in text


def test_a_peers_number_of_another_day_says_so():
    earlier = {"engine": "vLLM 0.25.1, earlier", "tpot_ms": 4.985}
    assert "| 4.985, earlier | ≤ 3.12 | met |" in render([decode(peer=earlier)])


def test_a_peer_measured_beside_ours_goes_before_one_of_another_day(tmp_path):
    def written(name: str, engine: str, **rows: float) -> None:
        points = [{**decode(batch=int(batch[1:])), "tpot_ms": value} for batch, value in rows.items()]
        points = [{field: row[field] for field in row if field not in ("_", "peer")} for row in points]
        header = {**HEADER, "what": "decode", "engine": engine}
        (tmp_path / name).write_text(json.dumps({**header, "records": points}))

    written("h200_decode.json", "npu_gptoss", b1=2.0, b8=3.0, b32=4.0)
    written("peer_decode.json", "vLLM 1", b1=5.0)
    written("peer_decode_earlier.json", "vLLM 1, earlier", b1=6.0, b8=7.0)
    ours = [record for record in load(tmp_path) if record["_"]["engine"] == "npu_gptoss"]
    assert [record.get("peer", {}).get("tpot_ms") for record in ours] == [5.0, 7.0, None]


def test_a_peers_own_file_makes_no_row():
    peer = decode(_={**HEADER, "engine": "vLLM 0.25.1", "what": "decode", "file": "peer.json"})
    assert "| 20b |" not in render([peer])


def kernel(name: str, us: float, selected: bool = True, **changes: object) -> dict[str, object]:
    numbers = {"floor_us": 10.0, "percent_of_floor": 1000 / us, "TBps": 1.0, "TFLOPs": 2.0}
    head = {**HEADER, "what": "kernel", "file": "kernel.json"}
    named = {"operation": "moe.experts", "case": "mxfp4 of 32 tokens=8", "kernel": f"moe.experts.{name}"}
    return {**named, "us": us, "selected": selected, **numbers, "_": head, **changes}


def test_a_kernel_that_is_faster_than_the_selected_one_is_not_hidden():
    text = render([kernel("chosen", 20.0), kernel("slower", 30.0, False), kernel("faster", 15.0, False)])
    assert "| chosen |" in text
    assert "| faster (not selected) |" in text
    assert "slower" not in text


def test_a_kernels_goal_is_a_share_of_the_floor_or_the_peers_time():
    assert "| – | ≥ 80 % | missed, 1.60 × |" in render([kernel("chosen", 20.0)])
    assert "| – | ≥ 80 % | met |" in render([kernel("chosen", 12.0)])
    attention = {"operation": "attention.paged", "case": "prefill full 8192"}
    beside = {**attention, "peer": {"engine": "vLLM 0.25.1", "us": 15.0}}
    assert "| 15.0 | ≤ peer | missed, 1.33 × |" in render([kernel("chosen", 20.0, **beside)])
    assert "| 15.0 | ≤ peer | met |" in render([kernel("chosen", 14.0, **beside)])
    assert "| – | – | – |" in render([kernel("chosen", 14.0, **attention)]), "without a peer there is nothing to keep"


def test_a_layout_of_several_gpus_is_named():
    assert "| 20b | mxfp4, tp2 | 8 |" in render([decode(layout="tp2")])


def agreement(**changes: object) -> dict[str, object]:
    record = {
        "model": "20b",
        "weights": "mxfp4",
        "tokens": 1024,
        "top1_agreement": 0.962,
        "largest_gap": 0.031,
        "mean_gap": 0.0072,
        "peer": {"engine": "vLLM 0.25.1"},
        "controls": [{"mistake": "sinks dropped", "top1_agreement": 0.31, "mean_gap": 0.41, "changed": 0.692}],
        "_": {**HEADER, "what": "agreement", "file": "agreement.json"},
    }
    return {**record, **changes}


def test_agreement_stands_beside_what_mistakes_leave_of_it():
    text = render([agreement()])
    assert "**96.2 %** of 1024 are also our largest logit" in text
    assert "| as it is | **96.2 %** | 0.007 |  |" in text
    assert "| sinks dropped | 31.0 % | 0.410 | 69.2 % |" in text
    without = agreement()
    del without["controls"]
    assert "as it is" not in render([without]), "records of an earlier form"


def test_the_page_shows_the_committed_records():
    """`python research/bench_table.py --write` after a change of the records."""
    page = (ROOT / TABLES.page).read_text(encoding="utf-8")
    assert page == TABLES.written(page), "the tables are not those of docs/benchmarks"


def test_every_record_file_is_named_in_the_folders_page():
    patterns = ("decode", "prefill", "kernel", "graphs", "agreement", "peer_")
    for file in FOLDER.glob("*.json"):
        assert any(pattern in file.name for pattern in patterns), file.name
        assert json.loads(file.read_text())["definitions"], file.name
