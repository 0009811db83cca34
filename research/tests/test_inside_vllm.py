"""Ours and stock's records of the same point meet, and the goals are read from the numbers. All numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from research import inside_vllm
from research.inside_vllm import PICTURE, load, pairs, picture, render

HEADER = {
    "machine": {"device": "NVIDIA H200"},
    "versions": {"vllm": "0.33.0", "commit": "0123456789abcdef"},
    "date": "2026-11-25",
    "settings": {},
}
OURS, STOCK = "vLLM 0.33.0 with npu_gptoss", "vLLM 0.33.0"


def write(folder: Path, name: str, what: str, engine: str, rows: list[dict[str, Any]], **header: Any) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"model": "20b", "weights": "mxfp4", **row} for row in rows]
    file.write_text(json.dumps({**HEADER, "what": what, "engine": engine, "records": rows, **header}))


def decode(ms: float, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "context": 1024, "tpot_ms": ms, **more}


def serving(streams: int, speed: float, itl: float = 5.0, ttft: float = 50.0) -> dict[str, Any]:
    times = {f"{name}_{kind}_ms": value for name, value in (("itl", itl), ("ttft", ttft)) for kind in ("median", "p99")}
    return {"streams": streams, "output_tokens_per_s": speed, **times}


SERVER = {
    "settings": {"start_s": 90.0, "kernels": ["npu-gptoss computes all."], "moe_backend": None, "flags": ["serve"]}
}


def test_stock_is_its_fastest_backend_at_each_point_and_says_which(tmp_path):
    write(tmp_path, "inside_vllm_0_33/decode.json", "decode", OURS, [decode(2.0), decode(4.0, 8)])
    for name, times in (("triton", (3.0, 6.0)), ("humming", (3.2, 5.0))):
        rows = [decode(times[0]), decode(times[1], 8)]
        write(tmp_path, f"peer_0_33/{name}/decode.json", "decode", STOCK, rows, settings={"moe_backend": name})
    text = render(load(tmp_path))
    assert "| 20b | mxfp4 | H200 | 1024 | 1 | **2.000** | 3.000 (triton) | 1.50 × | ≤ 1.850 | missed, 1.08 × |" in text
    assert "| 20b | mxfp4 | H200 | 1024 | 8 | **4.000** | 5.000 (humming) | 1.25 × | ≤ 3.050 | missed, 1.31 × |" in text


def test_stock_of_another_day_counts_only_where_none_was_measured_beside_ours(tmp_path):
    write(tmp_path, "inside_vllm_0_33/decode.json", "decode", OURS, [decode(2.0), decode(4.0, 8)])
    earlier = [decode(1.0, moe_backend="marlin"), decode(1.5, 8, moe_backend="marlin")]
    write(tmp_path, "peer_0_33/decode_earlier.json", "decode", f"{STOCK}, earlier", earlier)
    write(tmp_path, "peer_0_33/decode.json", "decode", STOCK, [decode(3.0)])
    text = render(load(tmp_path))
    assert "3.000 (default)" in text
    assert "1.500 (marlin, earlier)" in text


def test_of_ours_the_newest_record_of_a_point_counts_not_the_fastest(tmp_path):
    write(tmp_path, "inside_vllm_0_33/a.json", "decode", OURS, [decode(1.0)], date="2026-11-23")
    write(tmp_path, "inside_vllm_0_33/b/decode.json", "decode", OURS, [decode(2.0)], date="2026-11-24")
    ((mine, stock),) = pairs(load(tmp_path), "decode").values()
    assert (mine["tpot_ms"], stock) == (2.0, None)


@pytest.mark.parametrize(
    ("changes", "header"),
    [
        ({"model": "120b"}, {}),
        ({"layout": "tp2"}, {}),
        ({"weights": "bf16"}, {}),
        ({"context": 8192}, {}),
        ({}, {"machine": {"device": "NVIDIA H100 80GB HBM3"}}),
    ],
)
def test_goals_are_for_20b_in_mxfp4_on_one_h200(tmp_path, changes, header):
    write(tmp_path, "inside_vllm_0_33/decode.json", "decode", OURS, [decode(1.0, **changes)], **header)
    assert render(load(tmp_path)).splitlines()[4].endswith("| – | – |")
    write(tmp_path, "inside_vllm_0_33/decode.json", "decode", OURS, [decode(1.0)])
    assert render(load(tmp_path)).splitlines()[4].endswith("| ≤ 1.850 | met |")


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (serving(16, 1500.0), "≥ 1.4 × | met |"),
        (serving(16, 700.0), "≥ 1.4 × | missed: 0.50 of the speed |"),
        (serving(16, 1500.0, itl=10.0), "≥ 1.4 × | missed: p99 ITL 2.00 × |"),
        (serving(16, 1500.0, ttft=150.0), "≥ 1.4 × | missed: p99 TTFT 3.00 × |"),
    ],
)
def test_serving_faster_with_worse_latencies_misses_the_goal(tmp_path, mine, verdict):
    write(tmp_path, "inside_vllm_0_33/serving_ours.json", "serving", OURS, [mine], **SERVER)
    write(tmp_path, "peer_0_33/serving_stock.json", "serving", STOCK, [serving(16, 1000.0)], **SERVER)
    assert verdict in render(load(tmp_path))


def test_another_gpu_s_stock_and_another_number_of_clients_are_other_points(tmp_path):
    h100, more = {"machine": {"device": "NVIDIA H100 80GB HBM3"}}, {"clients": 4}
    write(tmp_path, "inside_vllm_0_33/h200.json", "serving", OURS, [serving(256, 900.0)], **SERVER)
    write(tmp_path, "inside_vllm_0_33/h100.json", "serving", OURS, [serving(256, 800.0)], **SERVER | h100)
    write(tmp_path, "inside_vllm_0_33/more.json", "serving", OURS, [serving(256, 950.0) | more], **SERVER)
    write(tmp_path, "peer_0_33/h100.json", "serving", STOCK, [serving(256, 400.0)], **SERVER | h100)
    found = {
        point[2:]: [r and r["output_tokens_per_s"] for r in pair]
        for point, pair in pairs(load(tmp_path), "serving").items()
    }
    assert found == {
        ("H100", (256, 1)): [800.0, 400.0],
        ("H200", (256, 1)): [900.0, None],
        ("H200", (256, 4)): [950.0, None],
    }


def test_flags_of_a_server_are_told(tmp_path):
    settings = SERVER["settings"] | {"flags": ["serve", "--no-enable-prefix-caching", "--api-server-count", "4"]}
    write(
        tmp_path, "inside_vllm_0_33/a.json", "serving", OURS, [serving(256, 900.0)], **SERVER | {"settings": settings}
    )
    assert "experts backend default, `--api-server-count 4`: ready" in render(load(tmp_path))


def test_milliseconds_above_a_thousand_are_written_out(tmp_path):
    write(tmp_path, "inside_vllm_0_33/serving_ours.json", "serving", OURS, [serving(256, 9.0, ttft=1234.4)], **SERVER)
    assert "| 5.0 / – | 5.0 / – | 1234 / – | 1234 / – |" in render(load(tmp_path))


def test_of_servers_the_faster_stock_is_the_one_with_more_tokens(tmp_path):
    write(tmp_path, "peer_0_33/serving_stock.json", "serving", STOCK, [serving(16, 1000.0)], **SERVER)
    write(tmp_path, "peer_0_33/serving_other.json", "serving", STOCK, [serving(16, 1200.0)], **SERVER)
    ((_, stock),) = pairs(load(tmp_path), "serving").values()
    assert stock["output_tokens_per_s"] == 1200.0
    assert "ready after 90 s. npu-gptoss computes all." in render(load(tmp_path))


def test_the_picture_is_whole_xml_with_a_line_for_each_engine(tmp_path):
    assert picture([]) is None
    rows = [serving(1, 500.0), serving(16, 4000.0)]
    write(tmp_path, "inside_vllm_0_33/serving_ours.json", "serving", OURS, rows, **SERVER)
    write(tmp_path, "peer_0_33/serving_stock.json", "serving", STOCK, rows[:1], **SERVER)
    shapes = list(ElementTree.fromstring(picture(load(tmp_path))).iter())
    circles = [float(shape.get("cy")) for shape in shapes if shape.tag.endswith("circle")]
    assert len(circles) == 3
    assert circles[1] < circles[0] == circles[2], "more tokens are higher, equal ones level"
    texts = [shape.text for shape in shapes if shape.tag.endswith("text")]
    assert {"ours 4000", "stock 500"} <= set(texts)


def test_the_committed_picture_is_of_the_committed_records():
    """`python research/bench_table.py --write` after a change of the records."""
    drawn = picture(load())
    assert (PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else None) == drawn


def test_other_files_of_a_run_are_no_records(tmp_path):
    write(tmp_path, "inside_vllm_0_33/greedy.json", "greedy", OURS, [{}])
    assert load(tmp_path) == []
    assert inside_vllm.render([]) == ""
