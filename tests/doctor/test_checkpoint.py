"""Complete checkpoints in both formats; of a damaged one the sentence of `model.check`, cut into finding and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from npu_gptoss.doctor.checkpoint import checkpoint
from npu_gptoss.model.checkpoint import write_checkpoint
from tests.checkpoints import random_config, random_tensors
from tests.doctor.machines import only, write

SMALL = {"layers": 2, "vocab_size": 64, "hidden": 64, "intermediate": 32, "experts": 4}


def make(folder: Path, *, mxfp4: bool = False) -> Path:
    """In several shards."""
    config = random_config(mxfp4=mxfp4, **SMALL)
    write_checkpoint(folder, config, random_tensors(config), max_shard_bytes=100_000)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("mxfp4", "phrase"), [(True, "MXFP4 experts"), (False, "experts in the BF16 layout")])
def test_a_complete_checkpoint_and_its_format(tmp_path, mxfp4, phrase):
    finding = only(checkpoint(make(tmp_path, mxfp4=mxfp4)), "ok", "is complete: 2 layers of 4 experts", phrase)
    assert f"in {len(list(tmp_path.glob('*.safetensors')))} files" in finding.sentence


def test_a_missing_shard_is_a_failure_with_its_remedy(tmp_path):
    gone = sorted(make(tmp_path).glob("*.safetensors"))[1]
    gone.unlink()
    assert only(checkpoint(tmp_path), "failed", gone.name).remedy == "Download what is missing."


def test_a_tokenizer_that_is_missing_or_cannot_be_read_is_a_failure(tmp_path):
    tokenizer = write(make(tmp_path) / "tokenizer.json", "{}")
    only(checkpoint(tmp_path), "failed", "tokenizer.json cannot be read as a tokenizer")
    tokenizer.unlink()
    first, second = checkpoint(tmp_path)
    only([first], "failed", "no tokenizer.json", "Copy tokenizer.json")
    assert second.state == "ok"


def test_a_folder_that_is_none_and_no_model_at_all(tmp_path):
    only(checkpoint(tmp_path / "gone"), "failed", "there is no such directory", "Give the path of a checkpoint")
    only(checkpoint(None), "not applicable", "--model")


def test_name_on_the_hub_is_told_its_folder_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = make(tmp_path / "models--openai--gpt-oss-20b/snapshots/a1")
    only(checkpoint(Path("openai/gpt-oss-20b")), "failed", "no such directory", f"cache, {folder}")
