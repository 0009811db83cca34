from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from npu_gptoss.bench import records
from npu_gptoss.bench.decode import random_prompts
from npu_gptoss.dense.rotary import apply_rotary
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import iterate_tensors, write_checkpoint
from npu_gptoss.model.rope import cos_sin_cache
from research import agreement
from research.agreement import MISTAKES, RAMP, calm_tensors, compare, main, mistaken
from tests.checkpoints import random_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> list[dict[str, list[int]]]:
    prompts = random_prompts(3, 20, engine.config.vocab_size, 5)
    results = engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    return [
        {"prompt_token_ids": prompt, "token_ids": list(result.token_ids)}
        for prompt, result in zip(prompts, results, strict=True)
    ]


def test_an_engine_agrees_with_itself(engine, greedy):
    record = compare(engine, greedy, "bf16")
    assert record["top1_agreement"] == record["decode_agreement"] == 1.0
    assert record["largest_gap"] == 0.0
    assert (record["requests"], record["tokens"]) == (3, 18)


def test_one_token_that_differs_is_seen_and_its_distance_told(engine, greedy):
    rows = [dict(row) for row in greedy]
    best = rows[0]["token_ids"][-1]
    other = (best + 1) % engine.config.vocab_size
    rows[0] = {**rows[0], "token_ids": [*rows[0]["token_ids"][:-1], other]}
    record = compare(engine, rows, "bf16")
    assert record["top1_agreement"] == pytest.approx(17 / 18, abs=1e-4)
    assert record["decode_agreement"] == pytest.approx(17 / 18, abs=1e-4)
    logits = engine.logits([*rows[0]["prompt_token_ids"], *rows[0]["token_ids"][:-1]])[-1]
    assert record["largest_gap"] == pytest.approx(float((logits[best] - logits[other]) / logits.std()), rel=1e-3)


def test_random_tokens_do_not_agree(engine, greedy):
    rows = [{**row, "token_ids": [(t + 1) % engine.config.vocab_size for t in row["token_ids"]]} for row in greedy]
    record = compare(engine, rows, "bf16")
    assert record["top1_agreement"] < 0.2
    assert record["decode_agreement"] == 0.0


def controls(record: dict) -> dict[str, dict]:
    return {control["mistake"]: control for control in record["controls"]}


def test_a_mistake_that_does_nothing_to_these_prompts_is_told_as_such(engine, greedy):
    """20 tokens are inside every window: one key less or more of 128 cannot show, and the agreement stays."""
    found = controls(compare(engine, greedy, "bf16"))
    assert tuple(found) == MISTAKES
    for mistake in ("window one key less", "window one key more"):
        assert found[mistake]["top1_agreement"] == 1.0
        assert found[mistake]["changed"] == found[mistake]["mean_gap"] == 0.0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_reaches_the_logits_inside_and_leaves_nothing_behind(engine, mistake):
    reaches_and_leaves(engine, mistake)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; make test-cuda runs it on one")
def test_mistakes_reach_the_kernels_of_a_gpu(directory):
    engine = Engine(directory, device="cuda", num_blocks=60, graphs="none")
    for mistake in MISTAKES:
        reaches_and_leaves(engine, mistake)


def reaches_and_leaves(engine: Engine, mistake: str) -> None:
    prompt = random_prompts(1, 140, engine.config.vocab_size, 3)[0]
    before = engine.logits(prompt)
    with mistaken(engine, mistake):
        wrong = engine.logits(prompt)
    assert not torch.equal(wrong, before)
    if "window" in mistake:
        assert torch.equal(wrong[:127], before[:127]), "which see all keys either way"
    assert torch.equal(engine.logits(prompt), before)
    with pytest.raises(ZeroDivisionError), mistaken(engine, mistake):
        raise ZeroDivisionError
    assert torch.equal(engine.logits(prompt), before)


@pytest.fixture(scope="module")
def calm_pair(tmp_path_factory) -> tuple[Engine, list[dict[str, list[int]]]]:
    """An engine in bfloat16, and what one in fp32 generates from the same calm weights."""
    path = tmp_path_factory.mktemp("calm")
    config = random_config(layers=8, hidden=256, intermediate=256, vocab_size=4096, experts=16)
    write_checkpoint(path, config, calm_tensors(config, 0, CPU))
    options = {"num_blocks": 60, "max_batch_size": 4}
    prompts = random_prompts(4, 128, config.vocab_size, 5)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    results = Engine(path, dtype="float32", **options).generate(prompts, params)
    rows = [
        {"prompt_token_ids": prompt, "token_ids": list(result.token_ids)}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return Engine(path, dtype="bfloat16", **options), rows


def test_calm_weights_agree_in_bf16_and_mistakes_lower_the_number(calm_pair):
    engine, rows = calm_pair
    record = compare(engine, rows, "bf16")
    assert record["top1_agreement"] > 0.93
    assert record["largest_gap"] < 0.1, "what is not the same is a near-tie"
    found = controls(record)
    for mistake in set(MISTAKES) - {RAMP}:
        assert found[mistake]["top1_agreement"] < record["top1_agreement"] - 0.06, mistake
        assert distance(found[mistake]) > 5 * distance(record), mistake
    assert found["sinks dropped"]["top1_agreement"] < 0.85


def distance(record: dict) -> float:
    """Of a place, on average: 0 where the tokens are the same."""
    return (1 - record["top1_agreement"]) * record["mean_gap"]


def test_no_tokens_to_compare_is_an_error(engine):
    with pytest.raises(InputError, match="need prompt_token_ids and token_ids"):
        compare(engine, [{"prompt_token_ids": [1], "token_ids": []}], "bf16")


def test_the_command_writes_its_record(directory, engine, greedy, tmp_path):
    peer, file = tmp_path / "greedy.json", tmp_path / "agreement.json"
    peer.write_text(json.dumps({"what": "greedy", "engine": "another engine", "records": greedy}))
    common = ("--model", str(directory), "--device", "cpu", "--dtype", "float32", "--num-blocks", "40")
    assert main(["compare", *common, "--peer", str(peer), "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert records.problems(content) == []
    assert content["records"][0]["top1_agreement"] == 1.0
    assert content["records"][0]["peer"] == {"engine": "another engine"}


def test_calm_weights_have_the_deviations_that_they_say():
    config = random_config(layers=2, hidden=256, intermediate=256, experts=16)
    tensors = {name: tensor.float() for name, tensor in calm_tensors(config, 0, CPU)}
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
    tensors = dict(calm_tensors(config, 0, CPU))
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
    tensors = dict(calm_tensors(config, 0, CPU))
    keys = tensors["model.layers.1.self_attn.k_proj.bias"].float().view(8, 64)
    score = keys.square().sum(-1).mean() * cos_sin_cache(config, 1, torch.float32)[0, 0] ** 2 / 8
    sinks = tensors["model.layers.1.self_attn.sinks"].float()
    assert sinks.mean().item() == pytest.approx(score.item(), rel=0.1)
    assert sinks.std().item() == pytest.approx(1.0, rel=0.3)


def test_the_command_writes_calm_weights(tmp_path, monkeypatch):
    config = replace(random_config(layers=1, mxfp4=True), dtype="bfloat16")
    monkeypatch.setattr(agreement, "full_config", lambda size: config)
    assert main(["checkpoint", str(tmp_path / "calm"), "--device", "cpu"]) == 0
    written = dict(iterate_tensors(tmp_path / "calm", config, dtype=torch.bfloat16, progress=False, expand=False))
    wanted = dict(calm_tensors(config, 0, CPU))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
