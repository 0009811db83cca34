"""A dumped kernel call is computed again: from every operation, in every layout of experts, and after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.cli import main
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import dumping, load_kernels, platform_override
from npu_gptoss.kernels.dumping import MOST_FILES, Dump
from npu_gptoss.kernels.profiling import observing
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import ascend, quantize_fp8
from npu_gptoss.moe.triton import layout
from npu_gptoss.verify import replay
from npu_gptoss.verify.calls import CallSpec, specs_of
from npu_gptoss.verify.cases import on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.moe_cases import expert_inputs, random_experts
from tests import ascend_ops
from tests.markdown import ROOT
from tests.refused import refused

CPU = torch.device("cpu")
OPERATIONS = sorted(name for name, check in CHECKS.items() if check.operation is not None)
load_kernels()


def calls_of(operation: str, kernel: str, most: int = 6) -> list[tuple[CallSpec, Any]]:
    check, spec = CHECKS[operation], registry.kernels[kernel]
    calls = ((each, call) for each in specs_of(spec, check, 0, 1) for call in check.calls(each))
    return list(islice(calls, most))


def dumped(operation: str, kernel: str, inputs: Any, folder: Path) -> replay.Dumped:
    """The first call of this kernel within a check's run, dumped and read."""
    with observing(Dump(folder)):
        CHECKS[operation].run(on(inputs, CPU), kernel)
    return replay.read(min(folder.glob(f"*-{kernel}.pt")))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_call_of_each_operation_is_computed_again(operation: str, tmp_path: Path) -> None:
    kernel = f"{operation}.small_ops"
    with platform_override("cpu", frozenset()), torch.inference_mode():
        for number, (_, call) in enumerate(calls_of(operation, kernel)):
            found = dumped(operation, kernel, call.inputs, tmp_path / str(number))
            assert (found.operation, found.kernel) == (operation, kernel)
            results = list(replay.results(found, CPU))
            ran = {result.call for result in results if not isinstance(result, tuple)}
            assert {kernel, f"{operation}.reference"} <= ran, results
            assert [result for result in results if not isinstance(result, tuple) and result.wrong] == []


@pytest.mark.parametrize("window", [None, 128])
def test_cache_keeps_only_the_blocks_that_the_call_names(window: int | None, tmp_path: Path) -> None:
    check = CHECKS["attention.paged"]
    spec, call = next(
        (spec, call)
        for spec, call in calls_of("attention.paged", "attention.paged.small_ops", 40)
        if call.inputs["sliding_window"] == window and call.name.startswith("mixed")
    )
    room = [
        torch.cat((call.inputs[name], torch.full_like(call.inputs[name], 9.0))) for name in ("key_cache", "value_cache")
    ]
    inputs = {**call.inputs, "key_cache": room[0], "value_cache": room[1]}
    with platform_override("cpu", frozenset()):
        found = dumped("attention.paged", "attention.paged.small_ops", inputs, tmp_path)
        want, got = check.definition(inputs), check.definition(found.inputs)
    assert len(found.inputs["key_cache"]) <= len(call.inputs["key_cache"]) < len(room[0])
    tokens = call.inputs["metadata"].num_tokens
    assert torch.equal(want["out"][:tokens], got["out"]), spec


def test_wrong_block_number_stays_out_of_range(tmp_path: Path) -> None:
    """The number that crashed the operator must crash it again."""
    _, call = calls_of("attention.write_kv", "attention.write_kv.small_ops", 1)[0]
    blocks, size = call.inputs["key_cache"].shape[:2]
    slots = call.inputs["metadata"].slot_mapping.clone()
    slots[0] = (blocks + 2) * size + 1
    kept = dumping.with_named_blocks({**call.inputs, "metadata": None, "slot_mapping": slots})
    assert kept["slot_mapping"][0] == (len(kept["key_cache"]) + 2) * size + 1


@pytest.mark.parametrize("share", [None, (2, 5)])
@pytest.mark.parametrize("form", ["bfloat16", "mxfp4", "float8_e4m3fn"])
@pytest.mark.parametrize("padding", [False, True])
def test_experts_without_tokens_are_left_out_and_the_sum_stays(form: str, share: Any, padding: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = expert_inputs(form, torch.bfloat16, generator, 3, top_k=2, share=share, padding=padding)
    inputs["hidden_states"] = inputs["hidden_states"].nan_to_num()
    kept = dumping.with_touched_experts(inputs)
    assert kept["weights"].num_experts < inputs["weights"].num_experts
    definition = CHECKS["moe.experts"].definition
    with platform_override("cpu", frozenset()):
        assert torch.equal(definition(kept)["out"], definition(inputs)["out"])


def drawn(form: str) -> Any:
    weights = random_experts(form if form == "mxfp4" else "bfloat16", torch.bfloat16, torch.Generator().manual_seed(1))
    return quantize_fp8(weights) if form == "float8_e4m3fn" else weights


@pytest.mark.parametrize("form", ["bfloat16", "mxfp4", "float8_e4m3fn"])
def test_triton_layout_is_turned_back_into_the_official_one(form: str) -> None:
    assert_equal(replay.official(layout.prepare(drawn(form), 7.0)), drawn(form))


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5"])
def test_ascend_layout_is_turned_back_into_the_official_one(cann: str) -> None:
    with ascend_ops.ascend(cann):
        assert_equal(replay.official(ascend.prepare(drawn("bfloat16"), 7.0)), drawn("bfloat16"))
        assert_equal(replay.official(ascend.prepare_packed(drawn("mxfp4"), 7.0)), drawn("mxfp4"))


def assert_equal(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    for name in (field.name for field in fields(want)):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert torch.equal(mine.float(), theirs.float()), name


def test_dump_of_an_ascend_kernel_is_compared_with_kernels_of_a_cpu(tmp_path: Path) -> None:
    inputs = expert_inputs("bfloat16", torch.bfloat16, torch.Generator().manual_seed(0), 5, share=(2, 6))
    with ascend_ops.ascend(), torch.inference_mode():
        found = dumped("moe.experts", "moe.experts.ascend", inputs, tmp_path)
    with platform_override("cpu", frozenset()):
        results = list(replay.results(found, CPU))
    assert ("moe.experts.ascend", "runs on ascend; this is cpu") in results
    right = [result.call for result in results if not isinstance(result, tuple) and not result.wrong]
    assert right == ["moe.experts.small_ops", "moe.experts.reference"]


def test_wrong_kernel_ends_with_one_and_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    _, call = calls_of("attention.paged", "attention.paged.small_ops", 3)[2]
    with platform_override("cpu", frozenset()):
        dumped("attention.paged", "attention.paged.small_ops", call.inputs, tmp_path)
    (file,) = tmp_path.iterdir()
    assert main(["verify", "--device", "cpu", "--replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert "chosen was attention.paged.small_ops" in out
    assert "ok   attention.paged.small_ops (chosen): " in out
    assert "--   attention.paged.ascend: runs on ascend; this is cpu" in out
    kernel = registry.kernels["attention.paged.small_ops"]
    monkeypatch.setitem(kernel.__dict__, "function", lambda *, out, **rest: out.zero_())
    assert main(["verify", "--device", "cpu", "--replay", str(file)]) == 1
    out = capsys.readouterr().out
    assert "FAIL attention.paged.small_ops (chosen): " in out
    assert "values differ" in out
    assert out.endswith("wrong: attention.paged.small_ops\n")


def test_folder_keeps_the_newest_calls_and_none_that_is_too_large(tmp_path, monkeypatch, caplog) -> None:
    dump = Dump(tmp_path)
    for number in range(MOST_FILES + 4):
        dump("moe.route.small_ops", {"logits": torch.full((2, 8), float(number)), "top_k": 4})
    files = sorted(tmp_path.iterdir())
    assert len(files) == MOST_FILES
    assert replay.read(files[0]).inputs["logits"][0, 0] == 4
    assert replay.read(files[-1]).inputs["logits"][0, 0] == MOST_FILES + 3
    monkeypatch.setattr(dumping, "MOST_BYTES", 63)
    dump("moe.route.small_ops", {"logits": torch.zeros(2, 8), "top_k": 4})
    assert sorted(tmp_path.iterdir()) == files
    assert "is not dumped" in caplog.text


def test_full_disk_leaves_a_call_out_and_the_server_running(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def full(content: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    Dump(tmp_path)("moe.route.small_ops", {"logits": torch.zeros(2, 8), "top_k": 4})
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text


def test_place_that_can_be_no_folder_is_refused_at_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_GPTOSS_DUMP", str(tmp_path / "file"))
    with refused("NPU_GPTOSS_DUMP"):
        dumping.install()


CRASH = """
import os, sys, torch
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import route
kernel = registry.kernels["moe.route.small_ops"]
kernel.__dict__["function"] = lambda **arguments: os.abort()
route(torch.arange(8.0).view(1, 8), 4, kernel="small_ops")
"""


def test_call_that_crashes_the_process_is_in_the_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "NPU_GPTOSS_DUMP": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CRASH], env=environment, capture_output=True)
    assert done.returncode == -6, done.stderr
    (file,) = tmp_path.iterdir()
    assert torch.equal(replay.read(file).inputs["logits"], torch.arange(8.0).view(1, 8))


def test_file_without_a_call_is_refused_in_a_sentence(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "x.pt"
    assert main(["verify", "--device", "cpu", "--replay", str(file)]) == 2
    assert "there is no such file; NPU_GPTOSS_DUMP=DIR" in capsys.readouterr().err
    for content in (b"no", b"", b"root:x:0:0:"):
        file.write_bytes(content)
        assert main(["verify", "--device", "cpu", "--replay", str(file)]) == 2
        assert "expected a kernel call that NPU_GPTOSS_DUMP wrote" in capsys.readouterr().err
    good = {"format": dumping.FORMAT, "npu_gptoss": "1", "kernel": "moe.route.small_ops", "arguments": {}}
    bad = {"dataclass": "subprocess:Popen", "fields": {}}
    changes = ({"format": "other"}, {"kernel": "toy.add.x"}, {"arguments": {"logits": bad}})
    for change, words in zip(
        changes, ("expected the format", "no check of the kernel", "no data of this"), strict=True
    ):
        torch.save({**good, **change}, file)
        with pytest.raises(InputError, match=words):
            replay.read(file)
