from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_gptoss.bench import random_checkpoint
from npu_gptoss.bench.random_checkpoint import full_config, model_name, random_tensors
from npu_gptoss.cli import main
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import check_checkpoint, iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe.mxfp4 import expand
from npu_gptoss.verify.moe_cases import STD, random_mxfp4, scales_of
from tests.checkpoints import random_config
from tests.model.published import published_config

CPU = torch.device("cpu")


def test_the_shapes_are_the_published_ones():
    for size, numbers in (("20b", (24, 32)), ("120b", (36, 128))):
        assert full_config(size) == replace(GptOssConfig.from_dict(published_config(*numbers)), dtype="bfloat16")
    with pytest.raises(InputError, match="the published sizes are 20b, 120b, got '7b'"):
        full_config("7b")


def test_a_model_is_named_by_all_of_its_shape():
    assert model_name(full_config("20b")) == "20b"
    assert model_name(full_config("120b", mxfp4=False)) == "120b"
    assert model_name(replace(full_config("20b"), eos_token_id=None, dtype=None)) == "20b"
    assert model_name(replace(full_config("20b"), sliding_window=64)) != "20b"
    assert model_name(random_config()) == "4x96x8e"


@pytest.mark.parametrize("std", [STD, 4 * STD, STD / 128, 4 * 2880**-0.5, 2**-7 * 2880**-0.5])
def test_values_are_normal_and_codes_of_any_deviation_are_spread_alike(std):
    blocks, scales = random_mxfp4((1, 512, 96), std, torch.Generator().manual_seed(0))
    values = expand(blocks, scales, torch.float32)
    assert values.shape == (1, 512, 96)
    assert set(scales.unique().tolist()) == set(scales_of(std))
    assert values.std().item() == pytest.approx(std, rel=0.03)
    assert abs(values.mean().item()) < std / 50
    kurtosis = (values**4).mean() / (values**2).mean() ** 2
    assert 2.4 < kurtosis < 3.1, "normal values have 3, uniform codes 2.2 or less"
    codes = torch.cat((blocks & 7, (blocks >> 4) & 7)).flatten()
    shares = torch.bincount(codes.int(), minlength=8) / codes.numel()
    assert shares.min() > 0.01, "some value is hardly used"
    assert shares.max() < 0.4, "most values are one and the same"


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    config = random_config(layers=1, mxfp4=True)
    first, again, other = (dict(random_tensors(config, seed, CPU)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
def test_command_writes_a_complete_checkpoint_and_overwrites_none(weights, tmp_path, monkeypatch, capsys):
    config = replace(random_config(layers=1, mxfp4=weights == "mxfp4"), dtype="bfloat16")
    monkeypatch.setattr(random_checkpoint, "full_config", lambda size, mxfp4: config)
    command = ["bench", "checkpoint", str(tmp_path / "out"), "--weights", weights, "--device", "cpu"]
    assert main(command) == 0
    assert f"20b {weights}, random" in capsys.readouterr().out
    check_checkpoint(tmp_path / "out", config)
    written = dict(iterate_tensors(tmp_path / "out", config, dtype=torch.bfloat16, progress=False))
    wanted = dict(random_tensors(config, 0, CPU))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert main(command) == 2
    assert "expected a directory without weights" in capsys.readouterr().err
