"""`npu-gptoss verify` from the command line: exit codes, output, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from npu_gptoss.cli import main
from npu_gptoss.verify import function_checks, runner

QUICK = ["--device", "cpu", "--cases", "1"]


def test_all_right_is_zero_with_a_line_for_each_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    assert main(["verify", "rope", *QUICK, "--seed", "7", "--mutate", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "2 kernels on cpu (cpu), seed 7" in out
    assert "ok   rope.tables: " in out
    assert "ramp truncated to whole pairs" in out
    assert out.endswith("all right\n")
    record = json.loads(file.read_text())
    assert (record["seed"], record["cases"], record["device"]) == (7, 1, "cpu")
    assert [entry["kernel"] for entry in record["kernels"]] == ["rope.rotate", "rope.tables"]
    assert all(entry["ok"] and entry["calls"] and entry["mistakes"] for entry in record["kernels"])
    assert list(tmp_path.iterdir()) == [file]


def test_wrong_kernel_is_one_and_shows_the_worst_elements(tmp_path, monkeypatch, capsys) -> None:
    right = function_checks.mxfp4.expand
    monkeypatch.setattr(
        function_checks.mxfp4,
        "expand",
        lambda blocks, scales, dtype: right((blocks << 4) | (blocks >> 4), scales, dtype),
    )
    file = tmp_path / "results.json"
    assert main(["verify", "mxfp4", *QUICK, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "ok   mxfp4.compress" in out
    assert "FAIL mxfp4.expand" in out
    assert "failed: every byte under every scale (values bfloat16)" in out
    assert "not allowed at all" in out
    assert "again: npu-gptoss verify mxfp4.expand --seed 0 --cases 1" in out
    assert out.endswith("wrong: mxfp4.expand\n")
    entries = {entry["kernel"]: entry for entry in json.loads(file.read_text())["kernels"]}
    assert entries["mxfp4.compress"]["ok"]
    assert not entries["mxfp4.expand"]["ok"]
    assert {call["error"] for call in entries["mxfp4.expand"]["calls"]} == {None}, "JSON has no infinity"


def test_definition_runs_on_one_core_and_threads_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, verify, before = [], runner.verify, torch.get_num_threads()

    def seeing(*arguments: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return verify(*arguments, **options)

    monkeypatch.setattr(runner, "verify", seeing)
    torch.set_num_threads(8)
    try:
        assert main(["verify", "rope.rotate", *QUICK]) == 0
        assert (seen, torch.get_num_threads()) == ([1], 8)
    finally:
        torch.set_num_threads(before)


def test_several_processes_give_the_results_of_one(tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        assert main(["verify", "rope", *QUICK, "--mutate", "--jobs", jobs, "--json", str(file)]) == 0
        found.append(json.loads(file.read_text()))
    assert found[0] == found[1]
    assert all(entry["calls"] and entry["mistakes"] for entry in found[1]["kernels"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["attenton"], "'attenton' names no kernel"),
        (["rope", "--cases", "-1"], "--cases must be 0 or more, got -1"),
        (["rope", "--jobs", "0"], "--jobs must be 1 or more, got 0"),
        (["rope", "--json", "/"], "/ cannot be written: name a file"),
        (["rope", "--device", "tpu"], "there is no device 'tpu'"),
        (["rope", "--replay", "x.pt"], "--replay computes one call: leave out FILTER"),
        (["--replay", "x.pt", "--json", "x.json"], "leave out FILTER, --mutate, --compile and --json"),
        (["--compile", "--jobs", "2"], "leave out --jobs and --device"),
        (["attention.paged.ascend"], "runs on ascend; this is cpu"),
    ],
)
def test_unusable_input_is_two(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", *arguments]) == 2
    assert text in capsys.readouterr().err
