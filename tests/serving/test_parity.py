"""vLLM with the plugin equals transformers in fp32 in each batch, chunk and cache; mutations show that the check bites.

Log-probabilities of every prompt token over the whole vocabulary come through vLLM's public API. One engine serves
nearly the whole file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import LLM

from npu_gptoss import attention, moe
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import rotation_cache
from npu_gptoss.serving import attention as serving_attention
from npu_gptoss.serving import moe as serving_moe
from tests.checkpoints import new_checkpoint, random_tensors, write_random_checkpoint
from tests.oracle import load_oracle, oracle_greedy, oracle_logits, random_prompts
from tests.serving.asking import TOLERANCE, VOCABULARY, ask, next_logits, prompt_logprobs, table, tokens, worst

pytestmark = pytest.mark.serving

LENGTHS = (1, 2, 16, 17, 127, 128, 129, 300, 700)
GREEDY = 64
CHUNK = 160  # tokens a step: the longer prompts come in chunks, which end on either side of the window


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def engine(directory: Path, start_engine: Callable[..., LLM]) -> LLM:
    return start_engine(directory, max_num_batched_tokens=CHUNK, logprobs_mode="raw_logits")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    return load_oracle(directory)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, VOCABULARY)


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [oracle_logits(oracle, prompt) for prompt in prompts]


def greedy_after(oracle: Any, prompt: list[int], answer: tuple[int, ...]) -> tuple[int, ...]:
    """The oracle's token at each position of the answer: equal to the answer if the oracle agrees."""
    logits = oracle_logits(oracle, [*prompt, *answer])
    return tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


# Parity


def test_prompt_positions_equal_transformers_in_a_chunked_mixed_batch(engine, prompts, expected):
    want = [logits.log_softmax(-1)[:-1] for logits in expected[1:]]  # the first prompt has one token, and so no answer
    assert worst(prompt_logprobs(engine, prompts[1:]), want) < TOLERANCE


def test_raw_logits_equal_transformers_in_a_mixed_batch_and_alone(engine, prompts, expected):
    want = [logits[-1] for logits in expected]
    engine.reset_prefix_cache()
    assert worst(next_logits(engine, prompts), want) < TOLERANCE
    engine.reset_prefix_cache()
    assert worst([next_logits(engine, [prompt])[0] for prompt in prompts], want) < TOLERANCE


def test_greedy_tokens_equal_transformers_while_requests_come_and_go(engine, prompts, oracle):
    """Nine requests; the short ones decode while the long ones still prefill, so that most steps mix both."""
    answers = tokens(ask(engine, prompts, max_tokens=GREEDY))
    assert answers == [greedy_after(oracle, *pair) for pair in zip(prompts, answers, strict=True)]
    assert answers[5] == oracle_greedy(oracle, prompts[5], GREEDY)  # once with transformers' own loop
    assert {len(answer) for answer in answers} == {GREEDY}
    assert len(set(answers[-1])) > 10  # no loop over a few tokens, which any model would agree on


def test_a_prefix_cache_hit_changes_nothing(engine, prompts, expected, oracle):
    """The same long prompt again, then with another ending: the cached blocks lie before and inside of the window."""
    engine.reset_prefix_cache()
    long = prompts[-1]
    other = long[:650] + prompts[-2][:30]
    first, again, branched = (ask(engine, [prompt], max_tokens=1, logprobs=-1)[0] for prompt in (long, long, other))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 688
    assert branched.num_cached_tokens == 640
    got = [table(answer.outputs[0].logprobs)[0] for answer in (first, again, branched)]
    assert worst(got, [expected[-1][-1], expected[-1][-1], oracle_logits(oracle, other)[-1]]) < TOLERANCE


def test_preempted_requests_give_the_same_tokens(
    directory: Path,
    prompts: list[list[int]],
    oracle: Any,
    start_engine: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """60 blocks hold the longest request, but not all: vLLM takes blocks away from requests that already answer."""
    small = start_engine(directory, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=60)
    preempted = []
    scheduler = small.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def watched() -> Any:
        output = schedule()
        preempted.extend(output.scheduled_cached_reqs.resumed_from_preemption)
        return output

    monkeypatch.setattr(scheduler, "schedule", watched)
    answers = tokens(ask(small, prompts, max_tokens=GREEDY))
    assert any(preempted)
    assert answers == [greedy_after(oracle, *pair) for pair in zip(prompts, answers, strict=True)]


def test_mxfp4_and_its_bf16_expansion_give_the_same_bits(engine, prompts, tmp_path, start_engine):
    write_random_checkpoint(tmp_path, vocab_size=VOCABULARY, mxfp4=True)
    packed = start_engine(tmp_path, max_num_batched_tokens=CHUNK, logprobs_mode="raw_logits")
    assert packed.llm_engine.vllm_config.model_config.quantization == "gptoss_mxfp4"
    engine.reset_prefix_cache()
    chosen = prompts[-3:]
    for ours, theirs in zip(next_logits(packed, chosen), next_logits(engine, chosen), strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(directory, prompts, expected, start_engine):
    """Both round, so tokens differ; measured against fp32 on the same text, ours must not be the worse."""
    rounded, chosen = load_oracle(directory, torch.bfloat16), prompts[1:-1]
    want = torch.cat([logits.log_softmax(-1)[:-1] for logits in expected[1:-1]])
    engine = start_engine(directory, dtype="bfloat16", max_num_batched_tokens=CHUNK)
    ours = torch.cat(prompt_logprobs(engine, chosen))
    theirs = torch.cat([oracle_logits(rounded, prompt).log_softmax(-1)[:-1] for prompt in chosen])
    error, agreement = {}, {}
    for name, got in (("ours", ours), ("theirs", theirs)):
        error[name] = float((got - want).abs().mean())
        agreement[name] = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    print(f"bf16 on {len(want)} rows: mean {error=}, argmax as in fp32 {agreement=}")
    assert 0 < error["ours"] < 1.1 * error["theirs"]
    assert agreement["ours"] > agreement["theirs"] - 0.02
    assert agreement["ours"] > 0.9


# Mutations: each is a defect that some port had or could have. The check above must see all of them.


@pytest.fixture(scope="module")
def probe(prompts: list[list[int]], expected: list[torch.Tensor]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """One prompt that reaches far beyond the window, in two chunks, and the oracle's log-probabilities."""
    return [prompts[-2]], [expected[-2].log_softmax(-1)[:-1]]


@pytest.fixture(scope="module")
def distance(engine: LLM, probe: tuple[list[list[int]], list[torch.Tensor]]) -> Callable[[], float]:
    """Says how far the engine is from transformers now."""
    return lambda: worst(prompt_logprobs(engine, probe[0]), probe[1])


def shown(distance: float) -> bool:
    """A defect is shown when it exceeds parity's tolerance by far."""
    return distance > 20 * TOLERANCE


def mutated_attention(**changes: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """paged_attention with one of its arguments changed."""

    def call(query, key_cache, value_cache, metadata, sinks, **rest):
        arguments = {"sinks": sinks, **rest}
        for name, change in changes.items():
            arguments[name] = change(arguments[name])
        return attention.paged_attention(query, key_cache, value_cache, metadata, **arguments)

    return call


ATTENTION_DEFECTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "sink dropped": {"sinks": lambda s: torch.full_like(s, -1e30)},
    "sink counted twice": {"sinks": lambda s: s + torch.tensor(2.0).log()},
    "sink taken from head 0": {"sinks": lambda s: s[:1].expand_as(s).contiguous()},
    "sinks in reverse": {"sinks": lambda s: s.flip(0)},
    "window 127": {"sliding_window": lambda w: w and w - 1},
    "window 129": {"sliding_window": lambda w: w and w + 1},
    "no window": {"sliding_window": lambda w: None},
    "window in every layer": {"sliding_window": lambda w: 128},
    "window in the other layers": {"sliding_window": lambda w: None if w else 128},
    "scale": {"scale": lambda s: s * 1.01},
}


@pytest.mark.parametrize("defect", ATTENTION_DEFECTS)
def test_parity_sees_a_defect_of_attention(defect, distance, monkeypatch):
    monkeypatch.setattr(serving_attention, "paged_attention", mutated_attention(**ATTENTION_DEFECTS[defect]))
    assert shown(distance())


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """gate, up, gate, up … -> up, gate, up, gate …"""
    return tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def halves(tensor: torch.Tensor) -> torch.Tensor:
    """Interleaved columns taken for two halves."""
    return tensor.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


EXPERT_DEFECTS: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "bias of the first product dropped": {"gate_up_proj_bias": torch.zeros_like},
    "bias of the second product dropped": {"down_proj_bias": torch.zeros_like},
    "bias of the first product twice": {"gate_up_proj_bias": lambda b: 2 * b},
    "bias of the second product twice": {"down_proj_bias": lambda b: 2 * b},
    "gate and up swapped": {"gate_up_proj": swapped, "gate_up_proj_bias": swapped},
    "gate and up taken for halves": {"gate_up_proj": halves, "gate_up_proj_bias": halves},
    "experts in another order": {"down_proj": lambda w: w.roll(1, 0)},
}


def prepared_experts(
    directory: Path, changes: dict[str, Callable[[torch.Tensor], torch.Tensor]], limit: float = 7.0
) -> list[Any]:
    """The experts of every layer of the checkpoint, with some of their tensors changed, in fp32."""
    config = GptOssConfig.from_directory(directory)
    stored = random_tensors(config)
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    layers = []
    for layer in range(config.num_hidden_layers):
        tensors = {name: stored[f"model.layers.{layer}.mlp.experts.{name}"].float() for name in names}
        changed = {name: changes.get(name, torch.clone)(tensor).contiguous() for name, tensor in tensors.items()}
        layers.append(moe.prepare_experts(moe.ExpertWeights(**changed), swiglu_limit=limit))
    return layers


def exchange_experts(engine: LLM, prepared: list[Any]) -> list[Any]:
    """Puts other experts into the layers; returns the earlier ones."""

    def exchange(model: Any) -> list[Any]:
        before = []
        for layer, new in zip(model.model.layers, prepared, strict=True):
            before.append(layer.mlp.experts.prepared_experts)
            layer.mlp.experts.prepared_experts = new
        return before

    return engine.apply_model(exchange)[0]


@pytest.mark.parametrize("defect", [None, *EXPERT_DEFECTS])
def test_parity_sees_a_defect_of_the_experts(defect, engine, directory, distance):
    """Without a defect, the experts made here from the checkpoint's tensors must equal the loaded ones."""
    before = exchange_experts(engine, prepared_experts(directory, EXPERT_DEFECTS[defect] if defect else {}))
    try:
        assert shown(distance()) if defect else distance() < TOLERANCE
    finally:
        exchange_experts(engine, before)


def not_renormalised(router_logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return router_logits.float().softmax(-1).topk(top_k, -1)


def test_parity_sees_a_router_that_does_not_renormalise(distance, monkeypatch):
    monkeypatch.setattr(serving_moe, "route", not_renormalised)
    assert shown(distance())


@pytest.mark.parametrize("limit", [6.0, 1e9])
def test_parity_sees_another_clamp(limit: float, engine: LLM, directory: Path, distance: Callable[[], float]) -> None:
    before = exchange_experts(engine, prepared_experts(directory, {}, limit))
    try:
        assert shown(distance())
    finally:
        exchange_experts(engine, before)


def test_parity_sees_yarn_with_a_rounded_ramp(engine: LLM, distance: Callable[[], float]) -> None:
    def fill(model: Any, truncate: bool) -> None:
        config = model.gpt_oss_config
        yarn = replace(config.rope_scaling, truncate=truncate)
        cache = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        cache.copy_(rotation_cache(replace(config, rope_scaling=yarn), cache.shape[0], cache.dtype))

    engine.apply_model(lambda model: fill(model, True))
    try:
        assert shown(distance())
    finally:
        engine.apply_model(lambda model: fill(model, False))


def test_the_engine_is_as_right_after_the_mutations_as_before(distance: Callable[[], float]) -> None:
    assert distance() < TOLERANCE
