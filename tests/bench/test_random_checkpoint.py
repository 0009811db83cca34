from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_gptoss.bench.actions import checkpoint
from npu_gptoss.bench.random_checkpoint import (
    SCALES,
    STD,
    Deviations,
    calm,
    full_config,
    model_name,
    random_mxfp4,
    random_tensors,
    scales_of,
    write_random_checkpoint,
)
from npu_gptoss.cli import main
from npu_gptoss.dense.rotary import apply_rotary
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import CheckpointError, check_checkpoint, iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import cos_sin_cache
from npu_gptoss.moe.mxfp4 import expand
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


def test_values_are_normal_with_the_deviation_asked_for():
    blocks, scales = random_mxfp4((3, 512, 96), STD, torch.Generator().manual_seed(0), CPU)
    values = expand(blocks, scales, torch.float32)
    assert values.shape == (3, 512, 96)
    assert set(scales.unique().tolist()) == set(SCALES)
    assert values.std().item() == pytest.approx(STD, rel=0.03)
    assert abs(values.mean().item()) < STD / 50
    kurtosis = (values**4).mean() / (values**2).mean() ** 2
    assert 2.4 < kurtosis < 3.1, "normal values have 3, uniform codes 2.2 or less"


@pytest.mark.parametrize("std", [STD, 4 * STD, STD / 128, 4 * 2880**-0.5, 2**-7 * 2880**-0.5])
def test_codes_of_any_deviation_are_spread_alike(std):
    blocks, scales = random_mxfp4((1, 512, 96), std, torch.Generator().manual_seed(0), CPU)
    values = expand(blocks, scales, torch.float32)
    assert set(scales.unique().tolist()) == set(scales_of(std))
    assert values.std().item() == pytest.approx(std, rel=0.03)
    codes = torch.cat((blocks & 7, (blocks >> 4) & 7)).flatten()
    shares = torch.bincount(codes.int(), minlength=8) / codes.numel()
    assert shares.min() > 0.01, "some value is hardly used"
    assert shares.max() < 0.4, "most values are one and the same"


def test_calm_weights_have_the_deviations_that_they_say():
    config = random_config(layers=2, hidden=256, intermediate=256, experts=16)
    tensors = {name: tensor.float() for name, tensor in random_tensors(config, 0, CPU, calm(config))}
    of = "model.layers.0."
    for name, gain, inputs in (
        ("self_attn.q_proj.weight", 0.25, 256),
        ("self_attn.v_proj.weight", 1.0, 256),
        ("self_attn.o_proj.weight", 0.32, 512),
        ("mlp.router.weight", 4.0, 256),
        ("mlp.experts.gate_up_proj", 4.0, 256),
        ("mlp.experts.down_proj", 2**-7, 256),
    ):
        assert tensors[of + name].std().item() == pytest.approx(gain * inputs**-0.5, rel=0.05), name
    assert tensors[of + "mlp.experts.gate_up_proj_bias"].std().item() == pytest.approx(1.0, rel=0.05)
    assert tensors["model.embed_tokens.weight"].std().item() == pytest.approx(1.0, rel=0.05)


def test_heads_of_calm_weights_look_back_and_every_other_one_of_a_window_layer_at_the_oldest_key():
    config = random_config(layers=2)
    tensors = dict(random_tensors(config, 0, CPU, calm(config)))
    table = cos_sin_cache(config, 400, torch.float32)
    cos, sin = table[:, :32], table[:, 32:]
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn."
        query = tensors[stem + "q_proj.bias"].float().view(1, 8, 64)
        key = tensors[stem + "k_proj.bias"].float().view(1, 2, 64).repeat_interleave(4, 1)
        query = apply_rotary(query, cos[300:301], sin[300:301])
        keys = apply_rotary(key.expand(301, -1, -1), cos[:301], sin[:301])
        found = 300 - torch.einsum("qhd,khd->hk", query, keys).argmax(dim=-1)
        assert found.max() <= 127
        assert len(found.unique()) > 2
        assert (found[::2] == 127).all() == (layer == 0)


def test_a_sink_of_calm_weights_weighs_about_as_much_as_a_key_that_is_looked_for():
    config = random_config(layers=2, heads=64, kv_heads=8)
    tensors = dict(random_tensors(config, 0, CPU, calm(config)))
    keys = tensors["model.layers.1.self_attn.k_proj.bias"].float().view(8, 64)
    score = keys.square().sum(-1).mean() * cos_sin_cache(config, 1, torch.float32)[0, 0] ** 2 / 8
    sinks = tensors["model.layers.1.self_attn.sinks"].float()
    assert sinks.mean().item() == pytest.approx(score.item(), rel=0.1)
    assert sinks.std().item() == pytest.approx(1.0, rel=0.3)


def test_without_a_word_the_weights_are_the_published_initializers():
    config = random_config(layers=1, mxfp4=True)
    plain, named = (dict(random_tensors(config, 1, CPU, which)) for which in (None, Deviations()))
    assert all(torch.equal(plain[name], named[name]) for name in plain)
    assert plain["model.layers.0.self_attn.q_proj.weight"].float().std().item() == pytest.approx(STD, rel=0.03)


def test_the_command_writes_calm_weights(tmp_path, monkeypatch, capsys):
    config = replace(random_config(layers=1, mxfp4=True), dtype="bfloat16")
    monkeypatch.setattr(checkpoint, "full_config", lambda size, mxfp4: config)
    assert main(["bench", "checkpoint", str(tmp_path / "calm"), "--calm", "--device", "cpu"]) == 0
    assert "20b mxfp4, random, calm" in capsys.readouterr().out
    written = dict(iterate_tensors(tmp_path / "calm", config, dtype=torch.bfloat16, progress=False, expand=False))
    wanted = dict(random_tensors(config, 0, CPU, calm(config)))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("mxfp4", [True, False])
def test_a_written_checkpoint_is_complete_and_generates(mxfp4, tmp_path):
    config = replace(random_config(layers=2, mxfp4=mxfp4), dtype="bfloat16")
    write_random_checkpoint(tmp_path, config, seed=3, device=CPU)
    check_checkpoint(tmp_path, config)
    engine = Engine(tmp_path, num_blocks=10)
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4
    with pytest.raises(CheckpointError, match="expected a directory without weights"):
        write_random_checkpoint(tmp_path, config, seed=3, device=CPU)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    config = random_config(layers=1, mxfp4=True)
    first, again, other = (dict(random_tensors(config, seed, CPU)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
