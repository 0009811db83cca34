"""The training network equals gpt-oss of transformers, and a training step moves every parameter."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import pytest
import torch

from npu_gptoss.harmony.vocabulary import VOCABULARY_FILE
from npu_gptoss.moe.mxfp4 import compress, expand
from npu_gptoss.tiny.checkpoint import load_trained, tiny_config
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from research.tiny_network import ABLATIONS, Knobs, forward, initial_parameters, round_experts
from tests.tolerances import assert_close


def test_network_equals_transformers():
    transformers = pytest.importorskip("transformers")
    config = replace(tiny_config(), vocab_size=300, eos_token_id=None, pad_token_id=None)
    parameters = initial_parameters(config, 300, seed=0)
    settings = {k: v for k, v in config.to_dict().items() if k not in ("architectures", "model_type")}
    oracle = transformers.GptOssForCausalLM._from_config(
        transformers.GptOssConfig(**settings, pad_token_id=None), attn_implementation="eager", dtype=torch.float32
    ).eval()
    oracle.load_state_dict(parameters)
    ids = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = oracle.model(ids).last_hidden_state
        got, _ = forward(parameters, config, ids)
        assert_close(got, want, scale=2.0)  # two orders of summation, four layers deep
        for name, knobs in ABLATIONS.items():
            spoilt, _ = forward(parameters, config, ids, knobs)
            assert (name == "nothing taken away") == torch.equal(spoilt, got), name


def test_rounding_in_training_is_that_of_the_format():
    weight = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    weight *= torch.exp2(torch.randint(-4, 4, (3, 1, 32)).float())
    weight[0, :32, 0] = 0.0
    weight[0, 32:, 1] = torch.arange(32) * 0.25  # ties
    want = expand(*compress(weight.transpose(1, 2).contiguous()), dtype=torch.float32).transpose(1, 2)
    assert torch.equal(round_experts(weight), want)


def test_training_moves_every_parameter(tmp_path):
    pytest.importorskip("tiktoken")
    pytest.importorskip("bpe_openai")
    from research import train_tiny

    (tmp_path / VOCABULARY_FILE).write_bytes(packaged_vocabulary())
    encoder = train_tiny.Encoder(tmp_path)
    encoder.use(load_trained().token_ids)
    args = argparse.Namespace(
        start=None, seed=0, pool=500, batch_tokens=512, bias_rate=0.3, rate=1e-2, steps=3, eager=False
    )
    args.quantize_from, args.trip, args.report = 0.0, 0.01, 1000
    random.seed(0)
    config = tiny_config(layers=2, hidden=32, intermediate=32, experts=4, heads=2, kv_heads=1)
    run = train_tiny.Training(args, config, encoder, torch.device("cpu"))
    before = {name: weight.detach().clone() for name, weight in run.parameters.items()}
    run.trip_weight.fill_(0.1)
    run.set_rate(1e-2)
    length = run.lengths[0]
    run.knobs.copy_(run.ablations["sinks dropped"])
    run.steps[length].load(torch.arange(run.steps[length].rows), only_long=False)
    run.steps[length]()
    assert torch.isfinite(run.seen).all()
    still = [name for name, weight in run.parameters.items() if torch.equal(weight, before[name])]
    assert still == []


def test_ablations_cover_every_knob():
    vectors = torch.stack([knobs.vector() for knobs in ABLATIONS.values()])
    assert (vectors != vectors[0]).any(0).all()
    assert torch.equal(Knobs.of(vectors[0]).vector(), vectors[0])
