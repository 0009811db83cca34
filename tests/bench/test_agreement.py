from __future__ import annotations

import json

import pytest
import torch

from npu_gptoss.bench import records
from npu_gptoss.bench.agreement import compare, compare_graphs, identical
from npu_gptoss.bench.decode import random_prompts
from npu_gptoss.bench.mistakes import MISTAKES, RAMP, mistaken
from npu_gptoss.bench.random_checkpoint import calm, write_random_checkpoint
from npu_gptoss.cli import main
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.errors import InputError
from tests.checkpoints import random_config


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


def test_tokens_count_as_identical_up_to_the_first_difference():
    assert identical([1, 2, 3], [1, 2, 3]) == 3
    assert identical([1, 2, 3], [1, 9, 3]) == 1
    assert identical([], [1]) == 0


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
    config = random_config(layers=12, hidden=256, intermediate=256, vocab_size=4096, experts=16)
    write_random_checkpoint(path, config, seed=0, device=torch.device("cpu"), deviations=calm(config))
    options = {"num_blocks": 60, "max_batch_size": 6}
    prompts = random_prompts(6, 128, config.vocab_size, 5)
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
        assert found[mistake]["top1_agreement"] < record["top1_agreement"] - 0.08, mistake
        assert found[mistake]["mean_gap"] > 3 * record["mean_gap"], mistake
    assert found["sinks dropped"]["top1_agreement"] < 0.75


def test_no_tokens_to_compare_is_an_error(engine):
    with pytest.raises(InputError, match="need prompt_token_ids and token_ids"):
        compare(engine, [{"prompt_token_ids": [1], "token_ids": []}], "bf16")


class NoGraphs:
    """Stands where graphs would be, and leaves every step to the eager path."""

    mode = "full"

    def takes(self, chunks: object) -> bool:
        return False


def test_graphs_are_compared_with_eager_steps_and_put_back(engine, monkeypatch):
    graphs = NoGraphs()
    monkeypatch.setattr(engine, "graphs", graphs)
    record = compare_graphs(engine, 2, 20, 3, "bf16")
    assert engine.graphs is graphs
    assert record["graphs"] == "full"
    assert record["tokens_compared"] == record["tokens_identical"] == 6
    assert record["ratio"] == pytest.approx(record["eager_tpot_ms"] / record["tpot_ms"], rel=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; make test-cuda runs it on one")
def test_real_graphs_give_the_tokens_of_eager_steps(directory, tmp_path):
    file = tmp_path / "graphs.json"
    options = ("--device", "cuda", "--num-blocks", "40", "--context", "20", "--steps", "8", "--json", str(file))
    assert main(["bench", "graphs", "--model", str(directory), *options]) == 0
    content = json.loads(file.read_text())
    assert records.problems(content) == []
    assert content["records"][0]["tokens_identical"] == content["records"][0]["tokens_compared"] == 8


def test_an_engine_without_graphs_has_nothing_to_compare(engine):
    with pytest.raises(InputError, match="decodes without graphs: name some with --graphs"):
        compare_graphs(engine, 1, 20, 2, "bf16")


def test_the_command_writes_its_record(directory, engine, greedy, tmp_path):
    peer, file = tmp_path / "greedy.json", tmp_path / "agreement.json"
    peer.write_text(json.dumps({"what": "greedy", "engine": "another engine", "records": greedy}))
    common = ("--model", str(directory), "--device", "cpu", "--dtype", "float32", "--num-blocks", "40")
    assert main(["bench", "agreement", *common, "--peer", str(peer), "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert records.problems(content) == []
    assert content["records"][0]["top1_agreement"] == 1.0
    assert content["records"][0]["peer"] == {"engine": "another engine"}
