"""The servers and clients of bench_serving: only whole answers count, and the wrong engine is not measured."""

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
POINT = (16, 96, 1024, 256)
STOCK_LINE = "(EngineCore pid=1) INFO 11-24 [mxfp4.py:9] Using 'TRITON' Mxfp4 MoE backend."


def result(streams: int, requests: int | None = None, gap: float = 0.001, **changes: Any) -> dict[str, Any]:
    """Results of a client: requests begin together, have a first token after 0.1 s and one every `gap` s."""
    requests = requests or script.requests_of(streams, 256)
    found = {"completed": requests, "total_output_tokens": requests * 256}
    times = {"start_times": [5.0] * requests, "ttfts": [0.1] * requests, "itls": [[gap] * 255] * requests}
    return {**found, **times, "total_input_tokens": requests * 1024, **changes}


def test_cut_or_refused_answers_are_no_measurement():
    assert script.row_of([result(16)], POINT)["requests"] == 96
    for broken in ({"completed": 95}, {"total_output_tokens": 96 * 256 - 1}):
        with pytest.raises(RuntimeError, match="16 streams: expected 96 answers of 256 tokens"):
            script.row_of([result(16, **broken)], POINT)


def test_clients_that_send_together_are_one_measurement():
    """Speeds of clients that end at different times do not add up, and their percentiles have no mean."""
    row = script.row_of([result(16, 48), result(16, 48, gap=0.003, start_times=[5.5] * 48)], POINT)
    duration = 0.5 + 0.1 + 255 * 0.003
    assert row["clients"] == 2
    assert row["duration_s"] == pytest.approx(duration, abs=1e-3)
    assert row["output_tokens_per_s"] == pytest.approx(96 * 256 / duration, rel=1e-4)
    assert (row["itl_mean_ms"], row["itl_p99_ms"], row["tpot_median_ms"]) == (2.0, 3.0, 2.0)


def test_energy_is_that_of_all_gpus_over_all_tokens(monkeypatch):
    """A machine without a counter has no number."""
    from vllm.third_party import pynvml

    assert script.row_of([result(16)], POINT)["joules_a_token"] is None
    assert script.row_of([result(16)], POINT, 4915.2)["joules_a_token"] == 0.2
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda gpu: {0: 1_500, 3: 20_000}[gpu])
    assert script.energy("0,3") == 21.5


def test_clients_share_streams_and_requests_without_rest():
    assert script.shares_of((5, 31, 9, 256), 2) == [(3, 16, 9, 256), (2, 15, 9, 256)]
    assert script.shares_of((1, 12, 9, 256), 2) == [(1, 12, 9, 256), None]


@pytest.mark.parametrize(("engine", "lines"), [("ours", [STOCK_LINE]), ("stock", [OURS_LINE]), ("ours", [])])
def test_the_wrong_engine_is_not_measured(tmp_path, engine, lines):
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    with pytest.raises(RuntimeError, match="the wrong model runs"):
        script.computing(log, engine)


def test_the_logged_kernels_are_kept(tmp_path):
    log = tmp_path / "log"
    log.write_text(STOCK_LINE)
    assert script.computing(log, "stock:humming") == ["Using 'TRITON' Mxfp4 MoE backend."]
    log.write_text(OURS_LINE)
    assert script.computing(log, "ours") == ["npu-gptoss computes all of gpt-oss by its own kernels."]


def test_engines_differ_in_the_backend_flag_only():
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
    """Measures engines with servers that are healthy and clients that find `found`; keeps the clients' arguments."""
    asked: list[list[str]] = []
    places: list[tuple[str, str, str]] = []

    class Client:
        found = staticmethod(lambda streams: result(streams))

        def __init__(self, log, environment, every) -> None:
            places.append((log.name, environment["CUDA_VISIBLE_DEVICES"], environment["NPU_GPTOSS"]))
            asked.extend(every)
            self.answers = iter(["ready", *(self.found(flag(point, "max-concurrency")) for point in every)])

        def answer(self, seconds):
            return next(self.answers)

        def begin(self) -> None: ...

        def end(self) -> None: ...

    def command(model, engine, gpus, port, flags):
        line = OURS_LINE if engine == "ours" else STOCK_LINE
        return [sys.executable, "-c", SERVER, str(port), line]

    config = SimpleNamespace(quantization="mxfp4")
    monkeypatch.setattr(script, "Client", Client)
    monkeypatch.setattr(script, "serve_command", command)
    monkeypatch.setattr(script, "GptOssConfig", SimpleNamespace(from_directory=lambda model: config))
    monkeypatch.setattr(script, "model_name", lambda config: "20b")
    monkeypatch.setattr(script, "document", lambda what, d, settings, rows, ours: {"records": rows})

    def run(engines: list[str], gpus: list[str], streams: list[int]) -> SimpleNamespace:
        options = {"engines": engines, "gpus": gpus, "streams": streams, "lengths": [(1024, 256)]}
        args = argparse.Namespace(model=tmp_path, out=tmp_path, clients=1, flags=[], **options)
        whole = [script.lane(args, number) for number in range(len(gpus))]
        return SimpleNamespace(whole=whole, asked=asked, places=places)

    run.client = Client
    return run


def flag(arguments: list[str], name: str) -> int:
    return int(arguments[arguments.index(f"--{name}") + 1])


def records(folder: Path, engine: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"serving_{engine}.json").read_text())["records"]


def test_each_gpu_measures_its_share_of_the_engines(measured, tmp_path):
    found = measured(["ours", "stock", "stock:humming"], ["0", "1"], [1])
    assert found.whole == [True, True]
    assert found.places == [
        ("ours_client0.log", "0", "1"),
        ("stock_humming_client0.log", "0", "0"),
        ("stock_client0.log", "1", "0"),
    ]
    assert all(len(records(tmp_path, name)) == 1 for name in ("ours", "stock", "stock_humming"))


def test_each_point_is_warmed_up_at_its_own_streams(measured, tmp_path):
    """At 16 streams an engine that was warmed up at 256 alone compiled kernels while it was measured."""
    found = measured(["ours", "stock"], ["0"], [16, 1])
    for engine, asked in (("ours", found.asked[:4]), ("stock", found.asked[4:])):
        assert [(row["streams"], row["requests"]) for row in records(tmp_path, engine)] == [(16, 96), (1, 12)]
        sent = [(flag(each, "max-concurrency"), flag(each, "num-prompts")) for each in asked]
        assert sent == [(16, 16), (16, 96), (1, 4), (1, 12)]
        assert len({flag(each, "seed") for each in asked}) == 4, "a prompt is sent twice"


def test_long_answers_take_as_long_as_short_ones():
    rounds = script.rounds_of([4, 64], [script.lengths("1024x256"), script.lengths("8192x1024")])
    assert rounds[1::2] == [(4, 24, 1024, 256), (64, 384, 1024, 256), (4, 12, 8192, 1024), (64, 128, 8192, 1024)]
    asked = script.arguments_of("u", Path("t"), rounds[5], 0)
    assert (flag(asked, "random-input-len"), flag(asked, "random-output-len")) == (8192, 1024)


def test_a_failure_keeps_earlier_points_and_the_next_engine(measured, tmp_path, capsys):
    measured.client.found = staticmethod(lambda streams: result(streams, completed=0 if streams == 4 else 12))
    assert measured(["ours", "stock"], ["0"], [1, 4]).whole == [False]
    for name in ("ours", "stock"):
        assert [row["streams"] for row in records(tmp_path, name)] == [1]
    assert "ours: 4 streams: expected" in capsys.readouterr().err


def test_a_server_that_ends_is_reported_with_its_log(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "serve_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no memory')"])
    assert measured(["ours"], ["0"], [1]).whole == [False]
    assert "no memory" in capsys.readouterr().err


def test_a_client_that_dies_names_its_log(tmp_path):
    dead = script.Client(tmp_path / "log", {}, [["--no-such-flag"]])
    with pytest.raises(RuntimeError, match="a client did not answer; its log: "):
        dead.answer(60)
    dead.end()


def test_the_model_logs_the_line_that_identifies_it():
    """Without it a server of ours would be taken for stock's."""
    text = (Path(script.__file__).parents[1] / "npu_gptoss/serving/cuda/model.py").read_text()
    assert serve_here.OURS.search(text)


def test_an_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        script.main(["--model", "m", "--out", "o", "--engines", "ours", "theirs"])
    assert "theirs" in capsys.readouterr().err
