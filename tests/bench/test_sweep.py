"""Layouts by machine, the command of each, and the two tables; once for real, two ranks over gloo."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from npu_gptoss.bench import records, sweep, tables
from npu_gptoss.cli import main

CUDA = torch.device("cuda")


def layouts(*names: str) -> list[sweep.Layout]:
    return [sweep.layout(name) for name in names]


@pytest.mark.parametrize("name", ["dp2", "tp", "tp0", "2", "ep1", "tp2x", "tp-2"])
def test_wrong_layout_is_refused_in_words(name):
    with pytest.raises(argparse.ArgumentTypeError, match=r"tpN or epN|name it tp1"):
        sweep.layout(name)


def test_layouts_without_their_gpus_are_named_and_not_measured():
    can, skipped = sweep.split_by_devices(layouts("tp1", "tp2", "ep2", "tp2", "ep4"), CUDA, 2)
    assert [each.name for each in can] == ["tp1", "tp2", "ep2"]
    assert skipped == {"ep4": "needs 4 GPUs, this machine has 2 cuda devices: not measured"}
    # ranks on a CPU are processes, of which any number starts
    assert sweep.split_by_devices(layouts("tp8"), torch.device("cpu"), None) == (layouts("tp8"), {})


def test_each_layout_gets_its_share_and_all_options_of_the_sweep():
    options = {"model": Path("m"), "size": None, "batch": [1, 8], "profile": True, "x": False}
    alone = sweep.command(sweep.layout("tp1"), options, Path("o"))
    start = [sys.executable, "-m", "npu_gptoss.cli", "bench", "engine", "--model", "m", "--batch", "1", "8"]
    assert alone == [*start, "--profile", "--share-experts", "tensor", "--out", "o"]
    shared = sweep.command(sweep.layout("ep4"), options, Path("o"))
    assert shared[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert shared[shared.index("--nproc-per-node") + 1] == "4"
    assert shared[shared.index("--share-experts") + 1] == "expert"


POINT = {"model": "20b", "weights": "mxfp4"}


def decode_row(layout: str | None, batch: int, tpot_ms: float, dollars: float, **changes: object) -> dict[str, object]:
    row = {**POINT, "batch": batch, "context": 8192, "tpot_ms": tpot_ms, "dollars_per_million_tokens": dollars}
    return {**row, **({} if layout is None else {"layout": layout}), **changes}


def prefill_row(layout: str, tokens: int, seconds: float, dollars: float, **changes: object) -> dict[str, object]:
    row = {**POINT, "layout": layout, "prompt_tokens": tokens, "prefill_s": seconds}
    return {**row, "dollars_per_million_tokens": dollars, **changes}


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


def run(directory: Path, out: Path, *names: str) -> int:
    options = ["--device", "cpu", "--dtype", "float32", "--batch", "1", "2", "--context", "20", "--tokens", "30"]
    options += ["--steps", "3", "--repeats", "1", "--num-blocks", "40", "--gpu-price", "6", "--out", str(out)]
    return main(["bench", "sweep", "--model", str(directory), *options, "--layouts", *names])


def test_one_and_two_ranks_are_measured_and_stand_in_one_file_a_kind(directory, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    processes = sweep.run_layout

    def alone_in_this_process(each, options, out):  # which spares a start of Python
        if each.gpus > 1:
            return processes(each, options, out)
        return main(sweep.command(each, options, out)[3:]) or None

    monkeypatch.setattr(sweep, "run_layout", alone_in_this_process)
    assert run(directory, tmp_path, "tp1", "ep2") == 0
    found = {kind: json.loads((tmp_path / f"{kind}.json").read_text()) for kind in ("decode", "prefill")}
    for written in found.values():
        assert written["not_measured"] == {}
        assert written["settings"]["layouts"] == ["tp1", "ep2"]
        assert str(tmp_path) not in json.dumps(written), "a path of this machine is in the record"
        assert str(directory) not in json.dumps(written), "a path of this machine is in the record"
    points = [(record["layout"], record["gpus"], record["batch"]) for record in found["decode"]["records"]]
    assert points == [("tp1", 1, 1), ("tp1", 1, 2), ("ep2", 2, 1), ("ep2", 2, 2)]
    for record in found["decode"]["records"]:
        tokens_an_hour = 3.6e6 / record["tpot_ms"] * record["batch"]
        assert record["dollars_per_million_tokens"] == pytest.approx(6e6 * record["gpus"] / tokens_an_hour, rel=1e-3)
    assert [(r["layout"], r["prompt_tokens"]) for r in found["prefill"]["records"]] == [("tp1", 30), ("ep2", 30)]
    page = (tmp_path / "tables.md").read_text()
    assert "| layout | 30 tokens |" in page
    assert "| batch | tp1 | ep2 |" in page
    assert page in capfd.readouterr().out


def test_a_layout_that_fails_takes_no_other_with_it(directory, tmp_path, monkeypatch, capsys):
    """Three ranks cannot share eight heads. The first layout's records are written before the second starts."""
    seen = []

    def started(each, options, out):
        seen.append((each.name, (tmp_path / "decode.json").is_file()))
        if each.name == "tp3":
            return "failed with exit status 1"
        measured(out, decode=decode_row(each.name, 1, 2.0, 1.0), prefill=prefill_row(each.name, 30, 0.1, 1.0))
        return None

    monkeypatch.setattr(sweep, "run_layout", started)
    assert run(directory, tmp_path, "tp1", "tp3", "tp2") == 1
    assert seen == [("tp1", False), ("tp3", True), ("tp2", True)]
    written = json.loads((tmp_path / "prefill.json").read_text())
    assert [record["layout"] for record in written["records"]] == ["tp1", "tp2"]
    assert written["not_measured"] == {"tp3": "failed with exit status 1"}
    assert "tp3: failed with exit status 1." in (tmp_path / "tables.md").read_text()
    err = capsys.readouterr().err
    assert "tp3: failed with exit status 1; its own output is above" in err


def measured(out: Path, **rows: dict[str, object]) -> None:
    """A record of each kind, as `bench engine` leaves them."""
    for kind, row in rows.items():
        content = records.document(kind, torch.device("cpu"), {}, [], 3.0, {})
        records.write({**content, "records": [row]}, out / f"{kind}.json")


def test_nothing_measured_is_an_error_and_leaves_no_file(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run_layout", lambda *_: "failed with exit status 1")
    assert run(directory, tmp_path, "tp2") == 2
    assert "no layout could be measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["decode.json", "tables.md"])
def test_a_folder_of_an_earlier_sweep_is_refused_and_kept(name, directory, tmp_path, monkeypatch, capsys):
    """A smaller sweep would leave some of the earlier numbers in the folder."""
    monkeypatch.setattr(sweep, "run_layout", None)
    (tmp_path / name).write_text("hours")
    assert run(directory, tmp_path, "tp1") == 2
    assert f"{tmp_path} holds {name} of an earlier run: name another folder with --out" in capsys.readouterr().err
    options = ("--device", "cpu", "--out", str(tmp_path))
    if name == "decode.json":
        assert main(["bench", "engine", "--model", str(directory), *options]) == 2
        assert f"{tmp_path} holds {name} of an earlier run" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "hours"


def test_records_of_an_interrupted_layout_are_kept(directory, tmp_path, monkeypatch):
    def ended(each: sweep.Layout, options: object, out: Path) -> None:
        measured(out, decode=decode_row(each.name, 1, 2.0, 1.0))
        if each.name == "tp2":
            raise SystemExit(143)

    monkeypatch.setattr(sweep, "run_layout", ended)
    with pytest.raises(SystemExit):
        run(directory, tmp_path, "tp1", "tp2", "ep2")
    kept = json.loads((tmp_path / "decode.json").read_text())
    assert [row["layout"] for row in kept["records"]] == ["tp1", "tp2"]
    assert kept["not_measured"] == {"tp2": "was ended before all of it was measured"}
    assert "tp2: was ended before all of it was measured." in (tmp_path / "tables.md").read_text()


def test_dead_child_is_reported_with_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    assert sweep.run_layout(sweep.layout("tp1"), {}, tmp_path) == "failed with exit status 7"
    monkeypatch.setattr(sweep, "command", lambda *_: [sys.executable, "-c", ""])
    assert sweep.run_layout(sweep.layout("tp1"), {}, tmp_path) is None


def test_each_table_is_under_its_own_machine(tmp_path, capsys):
    files = [tmp_path / "prefill.json", tmp_path / "decode.json"]
    measured(tmp_path, prefill=prefill_row("tp1", 8192, 0.1, 0.01), decode=decode_row("tp1", 1, 2.0, 1.0))
    here, other = (json.loads(file.read_text()) for file in files)
    shared = {"date": "2026-11-22T01:02:03+00:00", "versions": {"torch": "2.11.0"}}
    here |= {**shared, "machine": {"device": "NVIDIA H200"}, "not_measured": {"tp4": "needs 4 GPUs"}}
    other |= {**shared, "machine": {"device": "A100"}, "engine": "vLLM", "dollars_per_gpu_hour": None}
    del other["records"][0]["dollars_per_million_tokens"]
    for file, content in zip(files, (here, other), strict=True):
        file.write_text(json.dumps(content))
    assert main(["bench", "table", *map(str, files)]) == 0
    out = capsys.readouterr().out.splitlines()
    first = out.index("npu_gptoss on NVIDIA H200, 2026-11-22, torch 2.11.0; a GPU hour at $3.00.")
    second = out.index("vLLM on A100, 2026-11-22, torch 2.11.0.")
    assert first < out.index("| tp1 | 0.100 s, $0.010 |") < second < out.index("| 1 | 500 tok/s |")
    assert out[-1] == "tp4: needs 4 GPUs."
    files[0].write_text(json.dumps(here | {"what": "kernel"}))
    assert main(["bench", "table", str(files[0])]) == 2
    assert "records of prefill, decode, got 'kernel'" in capsys.readouterr().err


def test_a_sweep_that_is_ended_leaves_no_process_behind(tmp_path, monkeypatch):
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    pid = tmp_path / "pid"
    monkeypatch.setattr(sweep, "command", lambda *_: [sys.executable, "-S", "-c", child, str(pid)])
    parent = os.fork()
    if parent == 0:
        try:
            sweep.run_layout(sweep.layout("tp1"), {}, tmp_path)
        except SystemExit as end:
            os._exit(end.code)
        os._exit(1)
    deadline = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(parent, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
