"""What is drawn where, read back from the figures; and that files say what they show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from npu_gptoss.bench import plots
from npu_gptoss.cli import main
from npu_gptoss.errors import InputError

COMMITTED = Path(__file__).parents[2] / "docs" / "benchmarks"


def content(what: str, *rows: dict[str, Any], **machine: str) -> dict[str, Any]:
    header = {"what": what, "engine": "npu_gptoss", "date": "2026-11-22T01:02:03+00:00", "versions": {"torch": "2"}}
    return {**header, "machine": machine or {"device": "NVIDIA H200"}, "records": list(rows)}


def decode_row(layout: str, batch: int, tpot_ms: float, dollars: float | None) -> dict[str, Any]:
    row = {"model": "20b", "weights": "mxfp4", "projections": "bf16", "layout": layout, "context": 1024}
    row |= {"batch": batch, "tpot_ms": tpot_ms, "floor_ms": tpot_ms / 2}
    return row if dollars is None else {**row, "dollars_per_million_tokens": dollars}


def lines(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    (axes,) = figure.axes
    return {str(line.get_label()): list(zip(*map(list, line.get_data()), strict=True)) for line in axes.get_lines()}


def numbers(figure: Figure) -> dict[tuple[float, float], str]:
    return {note.xy: note.get_text() for note in figure.axes[0].texts}


def test_decode_is_speed_of_a_user_against_cost_a_line_a_layout():
    rows = [decode_row("tp2", 8, 2.0, 0.8), decode_row("tp1", 8, 4.0, 0.4), decode_row("tp1", 1, 2.0, 1.6)]
    drawn = dict(plots.figures(content("decode", *rows)))
    assert list(drawn) == ["decode_20b_mxfp4_1024_cost", "decode_20b_mxfp4_1024_tpot"]
    cost = drawn["decode_20b_mxfp4_1024_cost"]
    assert lines(cost) == {"tp1": [(1.6, 500.0), (0.4, 250.0)], "tp2": [(0.8, 500.0)]}
    assert numbers(cost) == {(1.6, 500.0): "1", (0.4, 250.0): "8", (0.8, 500.0): "8"}
    assert cost.axes[0].get_xlabel() == "$ a million output tokens"
    assert "NVIDIA H200, 2026-11-22" in cost.axes[0].get_title()
    assert lines(drawn["decode_20b_mxfp4_1024_tpot"]) == {
        "tp1": [(1, 2.0), (8, 4.0)],
        "tp1, floor": [(1, 1.0), (8, 2.0)],
        "tp2": [(8, 2.0)],
        "tp2, floor": [(8, 1.0)],
    }


def test_records_without_a_price_are_drawn_without_cost():
    drawn = dict(plots.figures(content("decode", decode_row("tp1", 1, 2.0, None))))
    assert list(drawn) == ["decode_20b_mxfp4_1024_tpot"]


def test_prefill_is_seconds_by_length_and_its_floor_in_the_same_unit():
    row = {"model": "20b", "weights": "mxfp4", "dollars_per_million_tokens": 0.01}
    rows = [{**row, "prompt_tokens": n, "prefill_s": n / 1e4, "floor_ms": n / 2e1} for n in (32768, 8192)]
    drawn = dict(plots.figures(content("prefill", *rows)))
    assert lines(drawn["prefill_20b_mxfp4_ttft"]) == {
        "tp1": [(8192, 0.8192), (32768, 3.2768)],
        "tp1, floor": [(8192, pytest.approx(0.4096)), (32768, pytest.approx(1.6384))],
    }
    assert numbers(drawn["prefill_20b_mxfp4_cost"])[(0.01, 0.8192)] == "8192"
    eight = dict(plots.figures(content("prefill", *({**row, "projections": "fp8"} for row in rows))))
    assert list(eight) == ["prefill_20b_mxfp4_fp8-projections_ttft", "prefill_20b_mxfp4_fp8-projections_cost"]


def test_kernels_are_bars_of_their_share_of_the_floor():
    row = {"operation": "moe.experts", "case": "batch 8", "us": 12.5, "percent_of_floor": 60.0}
    rows = [{**row, "kernel": "a"}, {**row, "kernel": "b", "percent_of_floor": 30.0, "us": 25.0}]
    rows.append({**row, "kernel": "b", "case": "batch 1"})
    ((stem, figure),) = plots.figures(content("kernel", *rows))
    assert stem == "kernel_moe.experts"
    bars = [sorted((bar.get_y(), bar.get_width()) for bar in group) for group in figure.axes[0].containers]
    assert [[width for _, width in group] for group in bars] == [[60.0], [30.0, 60.0]]
    assert bars[0][0][0] < bars[1][0][0] < bars[1][1][0], "kernels of a case side by side, then the next case"
    assert {text.get_text() for text in figure.axes[0].texts} == {"12.5 us", "25 us"}
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["batch 8", "batch 1"]


def test_a_server_is_what_a_user_sees_by_what_all_get():
    row = {"model": "m", "api": "chat", "input_tokens": 8, "output_tokens": 9, "rate": None, "concurrency": 4}
    row |= {"ttft_p50_ms": 20.0, "ttft_p99_ms": 50.0, "tpot_p50_ms": None, "output_tokens_per_s": 100.0}
    late = {**row, "concurrency": None, "rate": 2.5, "output_tokens_per_s": 30.0}
    ((stem, figure),) = plots.figures(content("serve", row, late, client="x86_64"))
    assert stem == "serve_m_chat_8_9_ttft"
    assert lines(figure) == {"p50": [(100.0, 20.0), (30.0, 20.0)], "p99": [(100.0, 50.0), (30.0, 50.0)]}
    assert numbers(figure)[(30.0, 20.0)] == "2.5/s"
    assert "client on x86_64" in figure.axes[0].get_title()


def test_kinds_without_a_picture_are_refused():
    with pytest.raises(InputError, match="there is no picture of 'agreement', but of decode, kernel, prefill, serve"):
        next(plots.figures(content("agreement")))


def test_the_command_writes_both_formats_the_same_each_time(tmp_path, capsys):
    files = [str(COMMITTED / f"h200_{what}_20b.json") for what in ("decode", "prefill")]
    assert main(["bench", "plot", *files, "--out", str(tmp_path / "one")]) == 0
    assert main(["bench", "plot", *files, "--out", str(tmp_path / "two")]) == 0
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert {"decode_20b_mxfp4_1024_cost.png", "prefill_20b_mxfp4_ttft.svg"} <= {file.name for file in one}
    assert [file.name for file in one] == [file.name for file in two]
    for first, second in zip(one, two, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
    assert (tmp_path / "one/prefill_20b_mxfp4_ttft.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    svg = (tmp_path / "one/decode_20b_mxfp4_1024_cost.svg").read_text()
    assert "tokens/s of each user</text>" in svg, "text is text"
    assert str(one[0]) in capsys.readouterr().out


def test_two_files_never_draw_over_each_other(tmp_path, capsys):
    file = str(COMMITTED / "h200_decode_20b.json")
    assert main(["bench", "plot", file, file, "--out", str(tmp_path / "out")]) == 2
    assert "two of these files make the same picture decode_20b_mxfp4_1024_cost" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_no_folder_is_told(tmp_path, capsys):
    (tmp_path / "out").touch()
    assert main(["bench", "plot", str(COMMITTED / "h200_decode_20b.json"), "--out", str(tmp_path / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_to_draw_is_an_error(tmp_path, capsys):
    file = tmp_path / "peer.json"
    rows = [{"operation": "attention.paged", "kernel": "FlashAttention-3", "case": "prefill", "us": 1.0}]
    file.write_text(json.dumps(content("kernel", *rows)))
    assert main(["bench", "plot", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "plot", str(COMMITTED / "h200_decode_20b.json"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'npu-gptoss[bench]'" in capsys.readouterr().err
