"""Which server and which client are run, that only whole answers count, and that a wrong engine is not measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from research import bench_serving as script
from scripts import serve_here

OURS_LINE = "(EngineCore pid=1) INFO 11-24 [model.py:96] npu-gptoss computes all of gpt-oss by its own kernels."
STOCK_LINE = "(EngineCore pid=1) INFO 11-24 [mxfp4.py:9] Using 'TRITON' Mxfp4 MoE backend."


def result(streams: int, requests: int | None = None, gap: float = 0.001, **changes: Any) -> dict[str, Any]:
    """What a client finds of requests that begin together, have a first token after 0.1 s and one each `gap` s."""
    requests = requests or script.requests_of(streams)
    found = {"completed": requests, "total_output_tokens": requests * script.OUTPUT}
    times = {"start_times": [5.0] * requests, "ttfts": [0.1] * requests, "itls": [[gap] * 255] * requests}
    return {**found, **times, "total_input_tokens": requests * 1024, **changes}


def test_every_point_has_several_rounds_of_requests():
    assert [script.requests_of(streams) for streams in (1, 16, 64, 256)] == [12, 96, 384, 1024]


def test_answers_that_are_cut_or_refused_are_no_measurement():
    assert script.row_of([result(16)], 16)["requests"] == 96
    for broken in ({"completed": 95}, {"total_output_tokens": 96 * script.OUTPUT - 1}):
        with pytest.raises(RuntimeError, match="16 streams: expected 96 answers of 256 tokens"):
            script.row_of([result(16, **broken)], 16)


def test_a_row_has_each_statistic_of_each_time():
    row = script.row_of([result(1)], 1)
    assert {f"{time}_{kind}_ms" for time in ("ttft", "itl", "tpot") for kind in ("mean", "median", "p99")} <= set(row)


def test_clients_that_send_together_are_one_measurement():
    """Speeds of clients that end at different times are not to be added, nor their percentiles to be averaged."""
    row = script.row_of([result(16, 48), result(16, 48, gap=0.003, start_times=[5.5] * 48)], 16)
    duration = 0.5 + 0.1 + 255 * 0.003
    assert row["clients"] == 2
    assert row["duration_s"] == pytest.approx(duration, abs=1e-3)
    assert row["output_tokens_per_s"] == pytest.approx(96 * 256 / duration, rel=1e-4)
    assert (row["itl_mean_ms"], row["itl_p99_ms"], row["tpot_median_ms"]) == (2.0, 3.0, 2.0)


def test_clients_share_streams_and_requests_without_rest():
    assert script.shares_of((5, 31, 256), 2) == [(3, 16, 256), (2, 15, 256)]
    assert script.shares_of((1, 12, 256), 2) == [(1, 12, 256), None]


@pytest.mark.parametrize(("engine", "lines"), [("ours", [STOCK_LINE]), ("stock", [OURS_LINE]), ("ours", [])])
def test_the_wrong_engine_is_not_measured(tmp_path, engine, lines):
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    with pytest.raises(RuntimeError, match="the wrong model runs"):
        script.computing(log, engine)


def test_what_the_log_says_of_the_kernels_is_kept(tmp_path):
    log = tmp_path / "log"
    log.write_text(STOCK_LINE)
    assert script.computing(log, "stock:humming") == ["Using 'TRITON' Mxfp4 MoE backend."]
    log.write_text(OURS_LINE)
    assert script.computing(log, "ours") == ["npu-gptoss computes all of gpt-oss by its own kernels."]


def test_both_engines_have_the_same_flags_but_for_the_backend():
    ours = script.serve_command(Path("m"), "ours", "0", 1, ["--x"])
    stock = script.serve_command(Path("m"), "stock", "0", 1, ["--x"])
    humming = script.serve_command(Path("m"), "stock:humming", "0", 1, ["--x"])
    assert ours == stock
    assert [word for word in humming if word not in stock] == ["--moe-backend", "humming"]
    two = script.serve_command(Path("m"), "ours", "0,1", 1, [])
    assert two[two.index("--tensor-parallel-size") + 1] == "2"


SERVER = """
import http.server, sys
port = int(sys.argv[1])
print(sys.argv[2], flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures engines with servers that are healthy and clients that find `answer`; the arguments are kept."""
    asked: list[list[str]] = []
    places: list[tuple[str, str, str]] = []

    class Client:
        answer = staticmethod(lambda streams, number: result(streams))

        def __init__(self, name, command, log, environment) -> None:
            places.append((name, environment["CUDA_VISIBLE_DEVICES"], environment["NPU_GPTOSS"]))

        def tell(self, what) -> None:
            if what == "next":
                self.number += 1
                return
            self.points, self.number = what, -1
            asked.extend(what)

        def hear(self, seconds):
            if self.number < 0:
                return "ready"
            flags = self.points[self.number]
            return self.answer(int(flags[flags.index("--max-concurrency") + 1]), self.number)

        def end(self) -> None:
            places.append(("end", "", ""))

    def command(model, engine, gpus, port, flags):
        line = OURS_LINE if engine == "ours" else STOCK_LINE
        return [sys.executable, "-c", SERVER, str(port), line]

    config = SimpleNamespace(quantization="mxfp4")
    monkeypatch.setattr(script, "Child", Client)
    monkeypatch.setattr(script, "serve_command", command)
    monkeypatch.setattr(script, "GptOssConfig", SimpleNamespace(from_directory=lambda model: config))
    monkeypatch.setattr(script, "model_name", lambda config: "20b")
    monkeypatch.setattr(
        script, "document", lambda what, d, settings, rows, ours: {"settings": settings, "records": rows}
    )

    def run(engines: list[str], gpus: list[str], streams: list[int]) -> SimpleNamespace:
        args = argparse.Namespace(
            model=tmp_path, out=tmp_path, engines=engines, gpus=gpus, streams=streams, clients=1, flags=[]
        )
        whole = [script.lane(args, number) for number in range(len(gpus))]
        return SimpleNamespace(whole=whole, asked=asked, places=places)

    run.client = Client
    return run


def test_each_gpu_takes_its_share_of_the_engines_and_each_engine_has_its_variable(measured, tmp_path):
    found = measured(["ours", "stock", "stock:humming"], ["0", "1"], [1])
    assert found.whole == [True, True]
    clients = [place for place in found.places if place[0] != "end"]
    assert clients == [
        ("client 0 of ours", "0", "1"),
        ("client 0 of stock:humming", "0", "0"),
        ("client 0 of stock", "1", "0"),
    ]
    assert {file.name for file in tmp_path.glob("*.json")} == {
        f"serving_{name}.json" for name in ("ours", "stock", "stock_humming")
    }


def test_each_point_is_warmed_up_at_its_own_streams_uncounted_and_no_prompt_is_sent_twice(measured, tmp_path):
    """At 16 streams an engine that was warmed up at 256 alone compiled kernels while it was measured."""
    found = measured(["ours", "stock"], ["0"], [16, 1])
    for engine, asked in (("ours", found.asked[:4]), ("stock", found.asked[4:])):
        rows = json.loads((tmp_path / f"serving_{engine}.json").read_text())["records"]
        assert [(row["streams"], row["requests"]) for row in rows] == [(16, 96), (1, 12)]
        told = [
            [int(flags[flags.index(f"--{name}") + 1]) for name in ("max-concurrency", "num-prompts", "seed")]
            for flags in asked
        ]
        assert [round[:2] for round in told] == [[16, 16], [16, 96], [1, 4], [1, 12]]
        assert len({seed for _, _, seed in told}) == 4


def test_what_was_measured_before_a_failure_is_kept_and_the_next_engine_is_measured(measured, tmp_path, capsys):
    measured.client.answer = staticmethod(lambda streams, number: result(streams, completed=0 if streams == 4 else 12))
    assert measured(["ours", "stock"], ["0"], [1, 4]).whole == [False]
    for name in ("ours", "stock"):
        rows = json.loads((tmp_path / f"serving_{name}.json").read_text())["records"]
        assert [row["streams"] for row in rows] == [1]
    assert "ours: 4 streams: expected" in capsys.readouterr().err


def test_a_server_that_ends_is_told_by_its_log(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "serve_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no memory')"])
    assert measured(["ours"], ["0"], [1]).whole == [False]
    assert "no memory" in capsys.readouterr().err


def test_ratios_are_of_the_same_streams(tmp_path):
    for name, gap in (("ours", 0.002), ("stock", 0.003)):
        rows = [script.row_of([result(1, gap=gap, ttfts=[0.001] * 12)], 1)]
        rows += [script.row_of([result(16)], 16)] if name == "stock" else []
        (tmp_path / f"serving_{name}.json").write_text(json.dumps({"records": rows}))
    lines = script.ratios(tmp_path, ["ours", "stock", "stock:humming"])
    assert lines == ["ours over stock, 1 streams: output tok/s 1.50 ×, p99 ITL 0.67 ×, p99 TTFT 1.00 ×"]


def test_the_line_that_tells_our_kernels_is_the_models():
    """Else a server of ours would be taken for stock's."""
    text = (Path(script.__file__).parents[1] / "npu_gptoss/serving/cuda/model.py").read_text()
    assert serve_here.OURS.search(text)


def test_an_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        script.main(["--model", "m", "--out", "o", "--engines", "ours", "theirs"])
    assert "theirs" in capsys.readouterr().err
