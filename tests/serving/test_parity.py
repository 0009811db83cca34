"""vLLM with the plugin equals transformers in fp32 in each batch, chunk and cache; mutations show that the check bites.

Log-probabilities of every prompt token over the whole vocabulary come through vLLM's public API. One engine serves
nearly the whole file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import LLM

from npu_gptoss import attention
from npu_gptoss.serving import attention as serving_attention
from npu_gptoss.serving import moe as serving_moe
from tests.checkpoints import new_checkpoint, write_random_checkpoint
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


def test_preempted_requests_give_the_same_tokens(directory, prompts, oracle, start_engine, monkeypatch) -> None:
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


# Mutations of what the model calls here; tests/model/test_transformer.py makes the others against the same oracle


def mutated_attention(**changes: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """paged_attention with one of its arguments changed."""

    def call(query, key_cache, value_cache, metadata, sinks, **rest):
        arguments = {"sinks": sinks, **rest}
        changed = {name: change(arguments[name]) for name, change in changes.items()}
        return attention.paged_attention(query, key_cache, value_cache, metadata, **arguments | changed)

    return call


def not_renormalised(router_logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return router_logits.float().softmax(-1).topk(top_k, -1)


DEFECTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "sink dropped": (
        *(serving_attention, "paged_attention"),
        mutated_attention(sinks=lambda s: torch.full_like(s, -1e30)),
    ),
    **{
        f"window {window}": (
            *(serving_attention, "paged_attention"),
            mutated_attention(sliding_window=lambda w, window=window: w and window),
        )
        for window in (127, 129)
    },
    "router": (serving_moe, "route", not_renormalised),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_parity_does_not_see_a_defect(defect, engine, prompts, expected, monkeypatch):
    """By one prompt that reaches far beyond the window, in two chunks."""
    monkeypatch.setattr(*DEFECTS[defect])
    engine.reset_prefix_cache()
    want = [expected[-2].log_softmax(-1)[:-1]]
    assert worst(prompt_logprobs(engine, prompts[-2:-1]), want) > 20 * TOLERANCE
