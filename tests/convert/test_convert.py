"""Checkpoints of other tools become the official tensors, bit for bit where no format is left."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_gptoss.cli import main
from npu_gptoss.convert import write as writer
from npu_gptoss.convert.source import KEPT_SCALES, open_source
from npu_gptoss.convert.write import Job, convert
from npu_gptoss.errors import InputError
from npu_gptoss.files import CheckpointError
from npu_gptoss.model.check import check_directory
from npu_gptoss.model.checkpoint import check_checkpoint
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe.mxfp4 import compress, expand
from tests.convert import foreign
from tests.convert.foreign import FP8, Tensors, small, write
from tests.refused import refused

LAYER = "model.layers.1."


def converted(source: Path, out: Path, to: str = "bf16") -> tuple[GptOssConfig, Tensors]:
    """The result, read as its files say."""
    convert(Job(open_source(source), out, to), progress=False)
    config = GptOssConfig.from_directory(out)
    check_checkpoint(out, config)
    files = sorted(out.glob("*.safetensors"))
    return config, {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "official": lambda tensors: tensors,
    "original": foreign.original,
    "unsloth": foreign.unsloth,
    "llm-compressor": foreign.linearised,
    "mlx-lm": foreign.mlx,
    "torch.compile": foreign.prefixed("_orig_mod."),
    "peft": foreign.prefixed("base_model.model."),
    "FSDP": foreign.prefixed("_fsdp_wrapped_module.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
    "several": lambda tensors: foreign.prefixed("module._orig_mod.base_model.model.")(foreign.unsloth(tensors)),
    "DDP": foreign.prefixed("module."),
    "multimodal": foreign.prefixed("language_model."),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_another_tool_gives_the_official_tensors(tmp_path: Path, layout: str) -> None:
    config, tensors = small()
    got_config, got = converted(write(tmp_path / "in", LAYOUTS[layout](tensors), config), tmp_path / "out")
    assert_same(got, tensors)
    assert got_config == config


@pytest.mark.parametrize("layout", ["original", "several"])
def test_packed_experts_keep_their_bytes(tmp_path: Path, layout: str) -> None:
    config, tensors = small(mxfp4=True)
    source = write(tmp_path / "in", LAYOUTS[layout](tensors), config)
    assert_same(converted(source, tmp_path / "out", "mxfp4")[1], tensors)


def test_scales_under_their_own_dtype_are_the_same_bytes(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    named = {n: t.view(torch.float8_e8m0fnu) if n.endswith("_scales") else t for n, t in tensors.items()}
    assert_same(converted(write(tmp_path / "in", named, config), tmp_path / "out", "mxfp4")[1], tensors)


def test_original_folder_takes_config_and_tokenizer_from_above(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "model/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model/original").mkdir()
    source = tmp_path / "model/original"
    parts = list(foreign.original(tensors).items())
    for number, part in enumerate((parts[:9], parts[9:])):  # as published of the 120b: without an index
        save_file({n: t.contiguous() for n, t in part}, source / f"model--0000{number + 1}-of-00002.safetensors")
    (source / "config.json").write_text(json.dumps(original_config(config)))
    got_config, got = converted(source, tmp_path / "out", "mxfp4")
    assert_same(got, tensors)
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    (tmp_path / "model/config.json").unlink()
    alone, _ = converted(source, tmp_path / "alone", "mxfp4")
    assert alone == got_config


def original_config(config: GptOssConfig) -> dict[str, object]:
    names = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim")
    names += ("num_attention_heads", "num_key_value_heads", "sliding_window", "rope_theta")
    yarn = config.rope_scaling
    return {name: getattr(config, name) for name in names} | {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "initial_context_length": yarn.original_max_position_embeddings,
        "rope_scaling_factor": yarn.factor,
        "rope_ntk_alpha": yarn.beta_slow,
        "rope_ntk_beta": yarn.beta_fast,
    }


@pytest.mark.parametrize("kind", ["block", "row"])
def test_float8_with_scales_becomes_its_product_in_bf16(tmp_path: Path, kind: str) -> None:
    config, tensors = small(hidden=160, intermediate=192)  # blocks that end in the middle
    section = {"block": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    section["row"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    stored = {"block": foreign.block_fp8, "row": foreign.row_fp8}[kind](tensors)
    source = write(tmp_path / "in", stored, config, quantization_config=section[kind])
    got = converted(source, tmp_path / "out")[1]
    assert sum(tensor.dtype == FP8 for tensor in stored.values()) >= 12
    want = dict(tensors)
    for name, tensor in stored.items():
        if tensor.dtype == FP8 and kind == "block":
            want[name] = (tensor.float() * foreign.spread(stored[f"{name}_scale_inv"], tensor.shape)).bfloat16()
        elif tensor.dtype == FP8 and "self_attn" in name:
            want[name] = (tensor.float() * stored[f"{name}_scale"].float()).bfloat16()
    if kind == "row":
        for name in ("gate_up_proj", "down_proj"):
            del want[f"{LAYER}mlp.experts.{name}"], got[f"{LAYER}mlp.experts.{name}"]
            near = (
                got[f"model.layers.0.mlp.experts.{name}"].float()
                - want.pop(f"model.layers.0.mlp.experts.{name}").float()
            )
            assert near.abs().max() < 0.07 * got.pop(f"model.layers.0.mlp.experts.{name}").abs().max()
    assert_same(got, want)


def test_float8_without_its_scales_is_refused(tmp_path: Path) -> None:
    config, tensors = small()
    name = f"{LAYER}self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(FP8)
    with refused(name, CheckpointError):
        open_source(write(tmp_path, tensors, config))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats_are_rounded_to_bf16(tmp_path: Path, dtype: torch.dtype) -> None:
    config, tensors = small()
    wide = {n: (t.float() * 1.003).to(dtype) for n, t in tensors.items()}
    got = converted(write(tmp_path / "in", wide, config, torch_dtype=str(dtype)), tmp_path / "out")[1]
    assert_same(got, {name: tensor.to(torch.bfloat16) for name, tensor in wide.items()})


def test_pruned_experts_are_counted_by_the_router(tmp_path: Path) -> None:
    config, tensors = small(experts=2, experts_per_token=2)
    stale = {"num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 4}
    source = write(tmp_path / "in", tensors, config, **stale)
    got_config, got = converted(source, tmp_path / "out")
    assert (got_config.num_local_experts, got_config.num_experts_per_tok) == (2, 2)
    assert_same(got, tensors)
    assert len(open_source(source).notes) == 1


def test_adapter_beside_no_index_and_a_stale_config_are_no_obstacle(tmp_path: Path) -> None:
    config, tensors = small()
    stale = {"architectures": ["FSDPGptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    first, second = dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])
    source = write(tmp_path / "in", first, config, file="model-00001-of-00002.safetensors")
    write(source, second, config, file="model-00002-of-00002.safetensors", **stale)
    (source / "adapter_model.safetensors").write_bytes(b"not read")
    assert_same(converted(source, tmp_path / "out")[1], tensors)


FAULTS: dict[str, Callable[[Tensors], Tensors]] = {
    "missing expert": lambda t: {n: x for n, x in foreign.unsloth(t).items() if "projs.3." not in n},
    "one expert too many": lambda t: foreign.unsloth(t)
    | {f"{LAYER}mlp.experts.down_projs.4.bias": t[f"{LAYER}mlp.experts.down_proj_bias"][0]},
    "turned": lambda t: t | {f"{LAYER}mlp.experts.down_proj": t[f"{LAYER}mlp.experts.down_proj"].transpose(1, 2)},
    "two layouts": lambda t: t | foreign.unsloth(t),
    "another head": lambda t: t | {"score.weight": torch.zeros(1, 96)},
    "integers": lambda t: t | {f"{LAYER}self_attn.sinks": torch.zeros(8, dtype=torch.int8)},
    "missing": lambda t: {n: x for n, x in t.items() if n != f"{LAYER}self_attn.sinks"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_incomplete_input_is_refused_before_anything_is_written(tmp_path: Path, fault: str) -> None:
    config, tensors = small()
    with pytest.raises(CheckpointError):
        open_source(write(tmp_path / "in", FAULTS[fault](tensors), config))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


REFUSED = {
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "AWQ": {"quant_method": "awq"},
    "NVFP4": {"quant_method": "modelopt"},
    "four bits": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


@pytest.mark.parametrize("tool", REFUSED)
def test_format_that_is_not_read_is_named_by_its_tool(tmp_path: Path, tool: str) -> None:
    config, tensors = small()
    with pytest.raises(InputError, match=tool):
        open_source(write(tmp_path, tensors, config, quantization_config=REFUSED[tool]))


def test_gguf_and_lost_experts_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(InputError, match="GGUF"):
            open_source(path)
    config, tensors = small()
    lost = {n: t for n, t in tensors.items() if not n.endswith("gate_up_proj")} | {
        "gate_up_proj$": torch.zeros(4, 96, 128)
    }
    with pytest.raises(InputError, match="without its experts"):
        open_source(write(tmp_path / "lost", lost, config))


def random_scales(tensors: Tensors) -> Tensors:
    """The same codes under other scales: groups whose largest code is small, and groups of zeros."""
    generator, out = torch.Generator().manual_seed(3), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            out[name] = torch.randint(118, 124, tensor.shape, dtype=torch.uint8, generator=generator)
        elif name.endswith("_blocks"):
            out[name] = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
            out[name][:, 0] &= 0x33  # codes up to 1.5, so that other scales would do too
            out[name][:, 1, 0] = 0
    return out


def test_there_and_back_again_gives_equal_bytes(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    tensors = random_scales(tensors)
    source = write(tmp_path / "in", tensors, config)
    converted(source, tmp_path / "bf16")
    assert_same(converted(tmp_path / "bf16", tmp_path / "back", "mxfp4")[1], tensors)
    # without the scales of before only the values are the same
    (tmp_path / "bf16" / KEPT_SCALES).rename(tmp_path / "away")
    got = converted(tmp_path / "bf16", tmp_path / "values", "mxfp4")[1]
    with pytest.raises(AssertionError):
        assert_same(got, tensors)
    for name in (n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")):
        theirs, ours = ((t[f"{name}_blocks"], t[f"{name}_scales"]) for t in (tensors, got))
        assert torch.equal(expand(*theirs).view(torch.int16), expand(*ours).view(torch.int16))


def test_changed_experts_take_no_scale_of_before(tmp_path: Path) -> None:
    config, tensors = small(mxfp4=True)
    converted(write(tmp_path / "in", tensors, config), tmp_path / "bf16")
    file = tmp_path / "bf16/model-00002-of-00004.safetensors"
    changed = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    changed[name] = changed[name] * 1.37
    save_file(changed, file)
    got = converted(tmp_path / "bf16", tmp_path / "back", "mxfp4")[1]
    want = compress(changed[name].transpose(1, 2).contiguous(), published=True)
    assert torch.equal(got[f"{name}_blocks"], want[0])
    assert torch.equal(got[f"{name}_scales"], want[1])


def test_interrupted_run_goes_on_to_equal_bytes(tmp_path: Path) -> None:
    """kill -9 in the middle; then the same command."""
    config, tensors = small(layers=6, experts=16, hidden=256, intermediate=256)
    source = write(tmp_path / "in", tensors, config)
    whole, out = tmp_path / "whole", tmp_path / "out"
    command = [sys.executable, "-m", "npu_gptoss.cli", "convert", str(source), str(out), "--to", "mxfp4", "--no-probe"]
    child = subprocess.Popen(command)
    staging = tmp_path / ".out.converting"
    limit = time.monotonic() + 120
    while not (staging / "model-00003-of-00008.safetensors").is_file():
        assert child.poll() is None and time.monotonic() < limit, "it ended before it was killed"  # noqa: PT018
    child.send_signal(signal.SIGKILL)
    child.wait()
    if out.exists():  # a slow look: the run was over
        pytest.skip("the run ended before it could be killed")
    assert convert(Job(open_source(source), out, "mxfp4"), progress=False) >= 2
    convert(Job(open_source(source), whole, "mxfp4"), progress=False)
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)
    assert not staging.exists()


class Stopped(Exception):
    pass


def stop_at_third(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    save = writer.save_file

    def save_or_fail(tensors: Tensors, file: Path, **options: object) -> None:
        if "-00003-of" in file.name and file.parent.name != KEPT_SCALES:
            file.write_bytes(b"half")
            raise error
        save(tensors, file, **options)

    monkeypatch.setattr(writer, "save_file", save_or_fail)


def test_full_disk_is_one_sentence_and_leaves_nothing_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"
    with monkeypatch.context() as patched:
        stop_at_third(patched, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with refused("OUT") as caught:
            convert(Job(open_source(source), out, "bf16"), progress=False)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not list((tmp_path / ".out.converting").glob(".model*"))
    assert convert(Job(open_source(source), out, "bf16"), progress=False) == 2


def test_disk_that_is_too_small_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small()
    job = Job(open_source(write(tmp_path / "in", tensors, config)), tmp_path / "out", "bf16")
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: free)
    with refused("OUT"):
        convert(job, progress=False)
    assert not list(tmp_path.rglob("out/*.safetensors"))


def test_only_a_held_lock_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre has no locks unless it is mounted with them."""
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"

    def flock(stream: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer.fcntl, "flock", flock)
    number = errno.EWOULDBLOCK
    with refused("OUT"):
        convert(Job(open_source(source), out, "bf16"), progress=False)
    number = errno.ENOSYS
    convert(Job(open_source(source), out, "bf16"), progress=False)
    check_checkpoint(out, config)


def test_another_command_does_not_go_on_with_these_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"
    with monkeypatch.context() as patched:
        stop_at_third(patched, Stopped())
        with pytest.raises(Stopped):
            convert(Job(open_source(source), out, "mxfp4"), progress=False)
    assert convert(Job(open_source(source), out, "bf16"), progress=False) == 0
    _, got = GptOssConfig.from_directory(out), load_file(out / "model-00002-of-00004.safetensors")
    assert "model.layers.0.mlp.experts.down_proj" in got


def test_folder_with_other_files_is_not_written_into(tmp_path: Path) -> None:
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with refused("OUT"):
        convert(Job(open_source(source), out, "bf16"), progress=False)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("out", ["link", "dead link", "."])
def test_out_behind_a_link_is_not_refused_after_the_work(tmp_path, capsys, monkeypatch, out) -> None:
    """Nor where it is the folder that the command runs in, which is another one afterwards."""
    config, tensors = small()
    write(tmp_path / "in", tensors, config)
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "link").symlink_to(there)
    (tmp_path / "dead link").symlink_to(tmp_path / "new")
    monkeypatch.chdir(there if out == "." else tmp_path)
    assert main(["convert", "../in" if out == "." else "in", out, "--to", "mxfp4"]) == 0
    assert "probe: not done" not in capsys.readouterr().out
    check_directory(tmp_path / "new" if out == "dead link" else there, text=False)


def test_a_mounted_folder_is_not_refused_after_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"
    out.mkdir()

    monkeypatch.setattr(Path, "rmdir", Mock(side_effect=OSError(errno.EBUSY, os.strerror(errno.EBUSY))))
    with refused("OUT"):
        convert(Job(open_source(source), out, "bf16"), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_folder_around_a_checkpoint_is_not_said_to_lack_weights(tmp_path: Path) -> None:
    config, tensors = small()
    inner = write(tmp_path / "snapshots/abc", tensors, config)
    for given, named in ((tmp_path, inner), (inner / "model.safetensors", inner), (tmp_path / "none", "no such")):
        with pytest.raises(InputError, match=str(named)):
            open_source(given)


def test_command_says_what_changed_and_the_engine_runs_the_result(tmp_path, capsys) -> None:
    config, tensors = small()
    noisy = {n: t * 0.99 if n.endswith("_proj") else t for n, t in tensors.items()}
    source, out = write(tmp_path / "in", noisy, config), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", "mxfp4"]) == 0
    said = capsys.readouterr().out
    errors = dict(re.findall(r"^mlp\.experts\.(\w+) +relative error (\S+),", said, re.M))
    assert errors.keys() == {"gate_up_proj", "down_proj"}
    assert 0.005 < float(errors["down_proj"]) < 0.02
    same, count = map(int, re.search(r"probe: (\d+) of (\d+) ", said).groups())
    assert count == 64
    assert same >= 50
    assert "OUT has no tokenizer.json" in said
    check_directory(out, text=False)
    with pytest.raises(SystemExit):
        main(["convert", str(source)])


def test_a_tokenizer_that_was_copied_is_not_said_to_be_missing(tmp_path, capsys) -> None:
    config, tensors = small()
    source, out = write(tmp_path / "in", tensors, config), tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    assert main(["convert", str(source), str(out), "--to", "bf16", "--no-probe"]) == 0
    assert "OUT has no" not in capsys.readouterr().out
