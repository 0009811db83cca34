"""Complete checkpoints in both formats, and what a download can leave out or damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from npu_gptoss.doctor.checkpoint import checkpoint
from npu_gptoss.model.checkpoint import write_checkpoint
from tests.checkpoints import random_config, random_tensors
from tests.doctor.machines import only, write

SMALL = {"layers": 2, "vocab_size": 64, "hidden": 64, "intermediate": 32, "experts": 4}


def make(folder: Path, *, mxfp4: bool = False, shard: int = 10**9) -> Path:
    config = random_config(mxfp4=mxfp4, **SMALL)
    write_checkpoint(folder, config, random_tensors(config), max_shard_bytes=shard)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("mxfp4", "phrase"), [(True, "MXFP4 experts"), (False, "experts in the BF16 layout")])
def test_a_complete_checkpoint_and_its_format(tmp_path, mxfp4, phrase):
    finding = only(checkpoint(make(tmp_path / "c", mxfp4=mxfp4)), "ok", "is complete: 2 layers of 4 experts", phrase)
    assert "1 file," in finding.sentence


def test_a_tokenizer_that_cannot_be_read_is_a_failure(tmp_path):
    folder = make(tmp_path / "c")
    write(folder / "tokenizer.json", "{}")
    only(checkpoint(folder), "failed", "tokenizer.json cannot be read as a tokenizer")


def test_shards_are_counted(tmp_path):
    folder = make(tmp_path / "c", shard=100_000)
    shards = len(list(folder.glob("*.safetensors")))
    assert shards > 1
    only(checkpoint(folder), "ok", f"in {shards} files")


def test_a_missing_shard_is_a_failure(tmp_path):
    folder = make(tmp_path / "c", shard=100_000)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    finding = only(checkpoint(folder), "failed", gone.name)
    assert finding.remedy == "Download what is missing."


def test_a_truncated_file_is_a_failure(tmp_path):
    folder = make(tmp_path / "c")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    finding = only(checkpoint(folder), "failed", "the file is truncated")
    assert "download the file again" in finding.remedy


def test_a_tensor_that_is_not_there_is_a_failure(tmp_path):
    folder = make(tmp_path / "c")
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = 3
    settings["layer_types"].append("sliding_attention")
    (folder / "config.json").write_text(json.dumps(settings))
    only(checkpoint(folder), "failed", "missing (model.layers.2.", "Check that config.json belongs")


def test_a_config_of_the_other_format_is_a_failure(tmp_path):
    folder = make(tmp_path / "c", mxfp4=True)
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    only(checkpoint(folder), "failed", "no quantization_config", "config.json that belongs to these files")


def test_a_checkpoint_without_a_tokenizer_is_a_failure(tmp_path):
    folder = make(tmp_path / "c")
    (folder / "tokenizer.json").unlink()
    first, second = checkpoint(folder)
    only([first], "failed", "no tokenizer.json", "Copy tokenizer.json")
    assert second.state == "ok"


def test_a_folder_that_is_none_and_no_model_at_all(tmp_path):
    only(checkpoint(tmp_path / "gone"), "failed", "there is no such directory", "Give the path of a checkpoint")
    only(checkpoint(None), "not applicable", "--model")
