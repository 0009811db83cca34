"""Tiny checkpoints: official layout, one function in two layouts, written whole or not at all."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from npu_gptoss.cli import main
from npu_gptoss.harmony.vocabulary import find_vocabulary
from npu_gptoss.model.checkpoint import check_checkpoint, expand_stream, iterate_tensors
from npu_gptoss.model.config import ConfigError, GptOssConfig
from npu_gptoss.tiny import checkpoint as tiny
from npu_gptoss.tiny.checkpoint import TinyError, load_trained, random_tensors, save_trained, tiny_config, write_tiny
from tests.refused import refused

SMALL = {"layers": 2, "hidden": 32, "intermediate": 32, "experts": 4, "heads": 2, "kv_heads": 1}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves out the tokenizer, which has its own tests and takes most of the time."""
    monkeypatch.setattr(
        tiny, "write_tokenizer_files", lambda directory: (directory / "tokenizer.json").write_text("{}")
    )
    return


def read(directory: Path) -> dict[str, torch.Tensor]:
    config = GptOssConfig.from_directory(directory)
    return dict(expand_stream(iterate_tensors(directory, config, dtype=torch.float32, progress=False), torch.float32))


def test_random_layouts_and_dtypes_are_one_function(tmp_path, quick):
    config = tiny_config(**SMALL)
    write_tiny(tmp_path / "bf16", config=config, seed=3)
    write_tiny(tmp_path / "mxfp4", config=config, seed=3, mxfp4=True)
    write_tiny(tmp_path / "fp32", config=config, seed=3, dtype="float32")
    write_tiny(tmp_path / "other", config=config, seed=4)
    want = read(tmp_path / "bf16")
    for name in ("mxfp4", "fp32"):
        got = read(tmp_path / name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[tensor], want[tensor]) for tensor in want), name
    assert not torch.equal(read(tmp_path / "other")["lm_head.weight"], want["lm_head.weight"])
    assert (
        json.loads((tmp_path / "mxfp4" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    )
    assert "quantization_config" not in json.loads((tmp_path / "fp32" / "config.json").read_text())


def test_trained_layouts_are_one_function(tmp_path, quick):
    write_tiny(tmp_path / "bf16", trained=True)
    write_tiny(tmp_path / "mxfp4", trained=True, mxfp4=True)
    want, got = read(tmp_path / "bf16"), read(tmp_path / "mxfp4")
    assert all(torch.equal(got[name], want[name]) for name in want)
    state = load_trained()
    rows = torch.tensor(state.token_ids)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(want[name][rows], state.parameters[name])
        unused = torch.ones(201_088, dtype=torch.bool)
        unused[rows] = False
        assert not want[name][unused].any(), "a row that is not in use must give the logit 0"


def test_random_weights_make_every_part_matter():
    """Values beyond the clamp, sinks that take a share, biases as large as their products."""
    config = tiny_config(layers=1)
    tensors = {name: tensor.float() for name, tensor in random_tensors(config)}
    layer = "model.layers.0."
    x = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"][:512].float(), (config.hidden_size,))
    experts = layer + "mlp.experts."
    gate_up = torch.einsum("th,ehi->eti", x, tensors[experts + "gate_up_proj"])
    gate_up = gate_up + tensors[experts + "gate_up_proj_bias"][:, None].float()
    assert 0.005 < (gate_up.abs() > config.swiglu_limit).float().mean() < 0.2
    logits = x @ tensors["lm_head.weight"].float().t()
    assert 1.5 < logits.std() < 2.5
    sinks = tensors[layer + "self_attn.sinks"].float()
    assert sinks.unique().numel() == config.num_attention_heads
    assert sinks.mean() > 1
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            assert tensor.float().std() > 0.2, name


def test_command_writes_a_checkpoint_that_is_checked_and_complete(tmp_path, capsys, monkeypatch):
    pytest.importorskip("bpe_openai")
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["tiny", str(tmp_path / "a" / "b"), *options, "--seed", "1"]) == 0
    assert "written" in capsys.readouterr().out
    directory = tmp_path / "a" / "b"
    config = GptOssConfig.from_directory(directory)
    assert config.vocab_size == 201_088
    assert config.num_hidden_layers == 2
    check_checkpoint(directory, config)
    assert find_vocabulary(directory) == directory
    names = {path.name for path in directory.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"} < names
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"], "temporary folders are gone"
    assert directory.stat().st_mode & 0o777 == 0o755, "a server may be another user"
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert main(["tiny", str(directory), *options, "--seed", "1"]) == 0
    assert "already there" in capsys.readouterr().out
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, quick, capsys):
    """A limit of the size of files stands for it: safetensors raises its own class of error for either."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        assert main(["tiny", str(tmp_path / "tiny"), "--layers", "1"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert "Make room" in said
    assert list(tmp_path.iterdir()) == []


def test_other_options_need_force_and_force_replaces(tmp_path, quick):
    """Behind a link, which stays one."""
    directory = tmp_path / "model"
    directory.symlink_to(tmp_path / "elsewhere")
    config = tiny_config(**SMALL)
    assert write_tiny(directory, config=config)
    assert not write_tiny(directory, config=config)
    with refused("--force", TinyError):
        write_tiny(directory, config=config, seed=1)
    first = read(directory)["lm_head.weight"]
    assert write_tiny(directory, config=config, seed=1, force=True)
    assert not torch.equal(read(directory)["lm_head.weight"], first)
    assert directory.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]


def test_truncated_checkpoint_is_not_taken_for_whole(tmp_path, quick):
    config = tiny_config(**SMALL)
    write_tiny(tmp_path / "model", config=config)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with refused("--force", TinyError):
        write_tiny(tmp_path / "model", config=config)


def test_a_directory_that_is_not_ours_is_never_replaced(tmp_path, quick):
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(TinyError, match="holds no tiny checkpoint"):
        write_tiny(tmp_path, config=tiny_config(**SMALL), force=True)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(TinyError, match="is a file"):
        write_tiny(tmp_path / "thesis.txt", config=tiny_config(**SMALL), force=True)


def test_interrupted_write_leaves_nothing(tmp_path, quick, monkeypatch):
    for module, name in ((tiny, "write_checkpoint"), (os, "replace")):  # a mounted folder refuses the second
        monkeypatch.setattr(module, name, Mock(side_effect=KeyboardInterrupt))
        (tmp_path / "model").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            write_tiny(tmp_path / "model", config=tiny_config(**SMALL))
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "100"], "--hidden must be a multiple of 32"),
        (["--intermediate", "48"], "--intermediate must be a multiple of 32"),
        (["--heads", "3", "--kv-heads", "2"], "num_attention_heads"),
        (["--trained", "--hidden", "64", "--seed", "1"], "leave --hidden, --seed away"),
        (["--mxfp4", "--dtype", "float32"], "leave --dtype away"),
    ],
)
def test_options_that_cannot_be_are_sentences(tmp_path, capsys, options, message):
    assert main(["tiny", str(tmp_path / "model"), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_trained_state_is_a_sentence(tmp_path):
    for content in (b"", b"nonsense" * 10):
        (tmp_path / "state.safetensors").write_bytes(content)
        with refused("state.safetensors", TinyError):
            load_trained(tmp_path / "state.safetensors")
    with refused("missing.safetensors", TinyError):
        load_trained(tmp_path / "missing.safetensors")


def test_saved_state_comes_back_unchanged(tmp_path):
    state = load_trained()
    save_trained(tmp_path / "state.safetensors", state.config, state.token_ids, state.parameters)
    again = load_trained(tmp_path / "state.safetensors")
    assert again.config == state.config
    assert again.token_ids == state.token_ids == sorted(state.token_ids)
    assert again.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_a_token_goes_to_no_more_experts_than_there_are():
    assert [tiny_config(experts=experts).num_experts_per_tok for experts in (1, 3, 4, 8)] == [1, 3, 4, 4]


def test_impossible_shape_is_refused_by_the_config():
    with refused("num_hidden_layers", ConfigError):
        tiny_config(layers=0)
