"""The command on a CPU, at sizes at which its files and its errors mean something and its times do not."""

from __future__ import annotations

import json

import pytest
import torch

from npu_gptoss.bench import decode, records, session
from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.cli import main
from npu_gptoss.engine.device import limit_threads
from npu_gptoss.kernels import load_kernels
from npu_gptoss.kernels.registry import registry
from tests.checkpoints import random_config


def bench(*words: object) -> int:
    return main(["bench", *map(str, words)])


def test_decode_writes_a_record_for_every_point(directory, tmp_path, capsys):
    file = tmp_path / "decode.json"
    options = ("--device", "cpu", "--batch", 1, 2, "--context", 20, 33, "--steps", 3, "--num-blocks", 40)
    assert bench("decode", "--model", directory, *options, "--gpu-price", 4.5, "--json", file) == 0
    content = json.loads(file.read_text())
    points = [(record["batch"], record["context"]) for record in content["records"]]
    assert points == [(1, 20), (2, 20), (1, 33), (2, 33)]
    assert content["dollars_per_gpu_hour"] == 4.5
    assert all(record["steps"] == 3 for record in content["records"])
    assert str(directory) not in file.read_text(), "a path of this machine is in the record"
    out = capsys.readouterr().out
    assert "tpot_ms: mean milliseconds between the ends of consecutive steps" in out
    assert "no nominal ceilings are known of it" in out
    assert "one GPU hour: 4.50 dollars" in out


def test_a_point_that_does_not_fit_is_left_out_and_said(directory, tmp_path, capsys):
    file = tmp_path / "decode.json"
    options = ("--device", "cpu", "--batch", 1, 2, "--context", 20, 300, "--steps", 2, "--num-blocks", 24)
    assert bench("decode", "--model", directory, *options, "--json", file) == 0
    points = [(record["batch"], record["context"]) for record in json.loads(file.read_text())["records"]]
    assert points == [(1, 20), (2, 20), (1, 300)]
    assert "batch 2, context 300: not measured: 2 requests of" in capsys.readouterr().err
    few = ("--device", "cpu", "--tokens", 500, "--num-blocks", 4)
    assert bench("prefill", "--model", directory, *few, "--json", tmp_path / "none.json") == 2
    assert "none of these points fits this engine" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_a_point_that_is_named_twice_is_measured_once(directory, tmp_path):
    file = tmp_path / "records.json"
    small = ("--device", "cpu", "--dtype", "float32", "--json", file)
    points = ("--batch", 1, 1, "--context", 20, 20, "--steps", 2, "--num-blocks", 10)
    assert bench("decode", "--model", directory, *points, *small) == 0
    assert len(json.loads(file.read_text())["records"]) == 1
    operations = ("attention.paged", "moe.experts", "moe.experts")
    sizes = ("--batch", 2, 2, "--context", 20, 20, "--tokens", 2, 9, 9, "--weights", "bf16", "bf16", "--samples", 1)
    assert bench("kernel", *operations, "--model", directory, *sizes, *small) == 0
    points = [records.key_of("kernel", row) for row in records.read(file)["records"]]
    assert len(points) == len(set(points)) > 0


@pytest.mark.parametrize("words", [("decode", "--size", "20b"), ("kernel",)])
def test_unwritable_place_is_refused_before_measuring(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "ceilings_of", None)  # measuring would raise
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "records.json"):
        assert bench(*words, "--json", place) == 2
        assert f"{place} cannot be written" in capsys.readouterr().err


def test_records_before_a_failure_or_ctrl_c_are_in_the_file(directory, tmp_path, monkeypatch):
    """Of a long list of points the largest may run out of memory, or be one too many to wait for."""
    measured = decode.run_decode

    def fails_at_two(engine, batch, *rest):
        if batch == 2:
            raise KeyboardInterrupt
        return measured(engine, batch, *rest)

    monkeypatch.setattr(decode, "run_decode", fails_at_two)
    options = ("--device", "cpu", "--dtype", "float32", "--batch", 1, 2, "--context", 20, "--steps", 2)
    options += ("--num-blocks", 20, "--json", tmp_path / "decode.json")
    assert bench("decode", "--model", directory, *options) == 130
    (record,) = json.loads((tmp_path / "decode.json").read_text())["records"]
    assert record["batch"] == 1


def test_prefill_writes_a_record_for_every_length(directory, tmp_path):
    file = tmp_path / "prefill.json"
    options = ("--device", "cpu", "--tokens", 70, 9, "--repeats", 2, "--num-blocks", 20, "--json", file)
    assert bench("prefill", "--model", directory, *options) == 0
    found = records.read(file)["records"]
    assert [(record["prompt_tokens"], record["repeats"]) for record in found] == [(70, 2), (9, 2)]
    assert all(record["prefill_min_s"] <= record["prefill_s"] <= record["prefill_max_s"] for record in found)


def test_kernels_of_every_operation_are_measured_at_a_checkpoints_shapes(directory, tmp_path, capsys):
    file = tmp_path / "kernel.json"
    options = ("--device", "cpu", "--dtype", "float32", "--batch", 2, "--context", 20, "--tokens", 9, "--samples", 1)
    load_kernels()
    operations = {name for name in registry.operations if name.split(".")[0] in ("attention", "dense", "moe")}
    assert bench("kernel", "--model", directory, *options, "--weights", "bf16", "mxfp4", "--json", file) == 0
    content = json.loads(file.read_text())
    assert {record["operation"] for record in content["records"]} == operations
    assert not any("reference" in record["kernel"] for record in content["records"])
    for operation in operations:
        of_one_case = [r for r in content["records"] if r["operation"] == operation and r["selected"]]
        assert len(of_one_case) == len({r["case"] for r in of_one_case}), "one kernel is selected for each case"
    assert "runs on ascend; this is cpu" in capsys.readouterr().err


def test_the_reference_is_measured_when_it_is_named(directory, tmp_path):
    file = tmp_path / "kernel.json"
    options = ("--device", "cpu", "--dtype", "float32", "--batch", 2, "--tokens", 5, "--samples", 1)
    named = ("--kernel", "reference", "--json", file)
    assert bench("kernel", "moe.route", "--model", directory, *options, *named) == 0
    (record, *_) = found = json.loads(file.read_text())["records"]
    assert {record["kernel"] for record in found} == {"moe.route.reference"}
    assert record["selected"] is False, "what is selected does not depend on what is measured"


@pytest.mark.parametrize("weights", ["auto", "bf16", "fp8"])
def test_random_weights_need_no_checkpoint(weights, tmp_path, monkeypatch):
    """The published shape is swapped for a tiny one of the same layout."""
    monkeypatch.setattr(session, "full_config", lambda size, mxfp4=True: random_config(layers=2, mxfp4=mxfp4))
    file = tmp_path / "decode.json"
    options = ("--device", "cpu", "--batch", 1, "--context", 20, "--steps", 2, "--num-blocks", 10)
    assert bench("decode", "--size", "20b", "--weights", weights, *options, "--json", file) == 0
    (record,) = json.loads(file.read_text())["records"]
    assert record["distinct_source"] == "counted"
    assert record["weights"] == "bf16", "kernels of a CPU take floats"


def test_small_model_gets_one_thread_on_a_cpu_and_a_user_keeps_the_choice(monkeypatch):
    """Waiting OpenMP threads spin: on a busy machine a step of the tiny model took ten times as long."""
    before = torch.get_num_threads()
    try:
        for config, device, variable, want in (
            (random_config(layers=1), "cpu", None, 1),
            (random_config(layers=1), "cpu", "3", 3),
            (random_config(layers=1), "cuda", None, 3),
            (full_config("20b"), "cpu", None, 3),
        ):
            torch.set_num_threads(3)
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if variable:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            limit_threads(config, torch.device(device))
            assert torch.get_num_threads() == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table", "nofile.json"), "nofile.json: there is no such file; `npu-gptoss bench … --json FILE` writes one"),
        (("compare", "a", "b"), "a: there is no such file"),
        (("kernel", "moe.router", "--device", "cpu"), "there are no cases of an operation 'moe.router'"),
        (
            ("kernel", "moe.route", "--device", "cpu", "--kernel", "small_ops", "fast"),
            "no kernel or solution of moe.route is called 'fast', but ",
        ),
        (("kernel", "moe.route", "--device", "cpu", "--kernel", "ascend"), "no kernel could run any of these cases"),
        *(
            (("kernel", "--gpu-price", wrong), f"must be a number from 0, got {wrong}")
            for wrong in ("-1", "nan", "inf")
        ),
        (("decode", "--model", "/nonexistent", "--device", "cpu"), "there is no such directory"),
    ],
)
def test_input_that_cannot_be_used_is_an_error_in_words(words, message, capsys):
    assert bench(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("decode", "--size", "20b", "--batch", 1, 0),
        ("decode", "--size", "20b", "--context", "many"),
        ("kernel", "--block-size", 0),
    ],
)
def test_a_number_that_counts_nothing_is_refused_when_it_is_read(words, capsys):
    """Not after weights of full size were made, nor by a division or an empty table in the middle of the measuring."""
    with pytest.raises(SystemExit) as end:
        bench(*words)
    assert end.value.code == 2
    assert f"expected a whole number from 1, got '{words[-1]}'" in capsys.readouterr().err
