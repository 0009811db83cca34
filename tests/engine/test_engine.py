"""The offline engine against transformers, for any batch, chunks and cache size."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from npu_gptoss.engine import Engine, Result, SamplingParams
from npu_gptoss.engine.engine import NonFiniteLogits
from npu_gptoss.engine.request import Request
from npu_gptoss.model import assembly
from npu_gptoss.model.checkpoint import iterate_tensors
from tests.checkpoints import write_random_checkpoint
from tests.oracle import oracle_greedy, oracle_logits, random_prompts
from tests.refused import refused

TOLERANCE = 1e-4  # absolute, on logits of standard deviation 2
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 130, 255, 300, 700)
GREEDY = 32

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, 512)


@pytest.fixture(scope="module")
def expected_logits(oracle: GptOssForCausalLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [oracle_logits(oracle, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def expected_tokens(oracle: GptOssForCausalLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [oracle_greedy(oracle, prompt, GREEDY) for prompt in prompts]


def worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True))


def tokens(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def is_idle(engine: Engine) -> bool:
    scheduler, allocator = engine.scheduler, engine.scheduler.allocator
    return not scheduler.waiting and not scheduler.running and allocator.num_free == allocator.num_blocks


# Parity


def test_logits_of_a_mixed_batch_equal_transformers(engine, prompts, expected_logits) -> None:
    assert worst(engine.batch_logits(prompts), expected_logits) < TOLERANCE
    assert is_idle(engine)


def test_logits_of_the_last_tokens_equal_the_logits_of_all(engine, prompts, expected_logits) -> None:
    last = [1 + index % len(prompt) for index, prompt in enumerate(prompts)]
    wanted = [logits[-count:] for logits, count in zip(expected_logits, last, strict=True)]
    found = engine.batch_logits(prompts, last=last)
    assert [len(logits) for logits in found] == last
    assert worst(found, wanted) < TOLERANCE


@pytest.mark.parametrize(("max_batch_tokens", "block_size"), [(100, 16), (127, 7), (33, 128)])
def test_chunks_that_cross_the_window_equal_transformers(
    directory: Path,
    prompts: list[list[int]],
    expected_logits: list[torch.Tensor],
    max_batch_tokens: int,
    block_size: int,
) -> None:
    engine = Engine(
        directory,
        dtype="float32",
        num_blocks=3000 // block_size,
        max_batch_tokens=max_batch_tokens,
        block_size=block_size,
    )
    assert worst(engine.batch_logits(prompts), expected_logits) < TOLERANCE


def test_greedy_tokens_equal_transformers_in_a_batch(engine, prompts, expected_tokens) -> None:
    results = engine.generate(prompts, SamplingParams(max_tokens=GREEDY))
    assert tokens(results) == expected_tokens
    assert {result.finish_reason for result in results} == {"length"}
    assert len(set(expected_tokens[-1])) > 10  # no loop over a few tokens, which any model would agree on


# Step by step


def finished(engine: Engine) -> dict[Request, Result]:
    ended: dict[Request, Result] = {}
    while engine.busy:
        ended |= {request: engine.result(request) for request in engine.step()}
    return ended


def test_late_requests_get_the_tokens_of_transformers(engine, prompts, expected_tokens) -> None:
    params, requests, ended = SamplingParams(max_tokens=GREEDY), [], {}
    for prompt in prompts[:6]:
        requests.append(engine.add_request(prompt, params))
        ended |= {request: engine.result(request) for request in engine.step() + engine.step()}
    ended |= finished(engine)
    assert [ended[request].token_ids for request in requests] == expected_tokens[:6]
    assert is_idle(engine)
    assert engine.step() == []


def test_cancelled_request_keeps_its_tokens_and_frees_its_blocks(engine, prompts, expected_tokens) -> None:
    cancelled, waiting, other = (engine.add_request(prompt, SamplingParams(max_tokens=9)) for prompt in prompts[:3])
    engine.cancel(waiting)
    for _ in range(4):
        engine.step()
    engine.cancel(cancelled)
    assert finished(engine).keys() == {other}
    results = [engine.result(request) for request in (cancelled, waiting, other)]
    assert [result.finish_reason for result in results] == ["cancelled", "cancelled", "length"]
    assert tokens(results) == [expected_tokens[0][:4], (), expected_tokens[2][:9]]
    engine.cancel(other)
    assert other.finish_reason == "length"
    assert is_idle(engine)


# A full cache


def test_a_full_cache_delays_requests_but_loses_nothing(directory, prompts, expected_tokens) -> None:
    """46 blocks of 16 hold the longest request (732 tokens) and no other."""
    engine = Engine(directory, dtype="float32", num_blocks=46, max_batch_tokens=300)
    assert tokens(engine.generate(prompts, SamplingParams(max_tokens=GREEDY))) == expected_tokens
    assert is_idle(engine)


def test_preempted_requests_continue_with_the_same_tokens(directory: Path, engine: Engine) -> None:
    """Ten requests of 3 blocks that grow to 9 each share 30 blocks: the younger ones give way again and again."""
    prompts = random_prompts([40] * 10, 512, seed=2)
    cramped = Engine(directory, dtype="float32", num_blocks=30)
    params = [
        SamplingParams(max_tokens=100, temperature=t, seed=5, logprobs=2, prompt_logprobs=1) for t in (0.0, 1.0)
    ] * 5
    got, want = cramped.generate(prompts, params), engine.generate(prompts, params)
    assert cramped.scheduler.num_preemptions > 5
    assert engine.scheduler.num_preemptions == 0
    assert tokens(got) == tokens(want)
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours.prompt_logprobs) == 40
        assert [p.token_id for p in ours.prompt_logprobs[1:]] == list(ours.prompt_token_ids[1:])
        near = [
            a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
        ]
        assert all(near)
        assert len(near) == 100
    assert is_idle(cramped)


def test_a_prompt_larger_than_the_cache_is_refused_before_anything_runs(directory: Path) -> None:
    engine = Engine(directory, dtype="float32", num_blocks=4)
    with refused("prompt"):
        engine.generate([[1], [1] * 65])
    assert is_idle(engine)
    result = engine.generate([[1] * 64], SamplingParams(max_tokens=5))[0]  # its one token needs no place in the cache
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


def test_generation_ends_where_the_context_ends(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, layers=1, max_positions=20)
    engine = Engine(tmp_path, dtype="float32", num_blocks=10)
    result = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=100))[0]
    assert (len(result.token_ids), result.finish_reason) == (17, "length")
    with refused("prompt"):
        engine.generate([[1] * 20])
    engine = Engine(tmp_path, dtype="float32", num_blocks=5, block_size=4)  # a cache of 20 tokens is not what limits it
    with refused("prompt"):
        engine.generate([[1] * 20])


# Sampling


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    prompts = random_prompts([5, 130, 40, 9], 512, seed=3)
    params = SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95, top_k=50, seed=11)
    together = tokens(engine.generate(prompts, params))
    assert together == [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert together == tokens(engine.generate(prompts[::-1], params))[::-1]


def test_other_seeds_and_no_seed_give_other_tokens(engine: Engine) -> None:
    def sample(seed: int | None) -> tuple[int, ...]:
        return engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=1.0, seed=seed))[0].token_ids

    assert len({sample(1), sample(2), sample(None), sample(None)}) == 4
    assert sample(1) == sample(1)
    assert sample(0) == sample(0)


def test_sampled_tokens_follow_the_distribution_of_transformers(engine: Engine, oracle: GptOssForCausalLM) -> None:
    """2000 first tokens at temperature 0.7 against transformers' probabilities: chi-square over the likely tokens."""
    prompt, count = [7, 8, 9], 2000
    probabilities = (oracle_logits(oracle, prompt)[-1] / 0.7).softmax(-1)
    params = [SamplingParams(max_tokens=1, temperature=0.7, seed=seed) for seed in range(count)]
    drawn = torch.tensor([t for (t,) in tokens(engine.generate([prompt] * count, params))])
    likely = probabilities.topk(20)
    observed = torch.stack([(drawn == i).sum() for i in likely.indices]).float()
    rest = torch.tensor([count - observed.sum()])
    expected = torch.cat([likely.values, 1 - likely.values.sum(0, keepdim=True)]) * count
    assert expected.min() > 5
    statistic = ((torch.cat([observed, rest]) - expected) ** 2 / expected).sum()
    assert statistic < 45.3  # 99.9 % quantile of chi-square with 20 degrees of freedom; the seeds are fixed


# Ends


def test_a_stop_token_ends_the_answer_and_ignore_eos_goes_past_it(directory: Path, engine: Engine) -> None:
    free = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))[0]
    stop = next(token for i, token in enumerate(free.token_ids) if i >= 5 and token not in free.token_ids[:i])
    upto = free.token_ids[: free.token_ids.index(stop) + 1]
    stopped = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30, stop_token_ids=(stop,)))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (upto, "stop")
    engine_with_eos = Engine(directory, dtype="float32", num_blocks=20)
    engine_with_eos.stop_token_ids = frozenset({stop})
    assert engine_with_eos.generate([[1, 2, 3]], SamplingParams(max_tokens=30))[0].token_ids == upto
    another = SamplingParams(max_tokens=30, stop_token_ids=(511,))  # in addition to the model's own
    assert engine_with_eos.generate([[1, 2, 3]], another)[0].token_ids == upto
    ignoring = engine_with_eos.generate([[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == (free.token_ids, "length")


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ('{"eos_token_id": [3, 4]}', {3, 4, 9}),
        ('{"eos_token_id": 3}', {3, 9}),
        ('{"eos_token_id": null}', {9}),
        ("{}", {9}),
        (None, {9, 200002, 200012, 199999}),  # return, call, endoftext
    ],
)
def test_stop_tokens_come_from_both_configurations(tmp_path, generation_config, expected) -> None:
    write_random_checkpoint(tmp_path, layers=1, eos_token_id=9)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(generation_config)
    assert Engine(tmp_path, num_blocks=1).stop_token_ids == expected


# Log-probabilities


def test_logprobs_equal_transformers(engine: Engine, oracle: GptOssForCausalLM) -> None:
    prompt = random_prompts([140], 512, seed=4)[0]
    params = SamplingParams(max_tokens=8, temperature=1.0, top_k=40, seed=1, logprobs=3, prompt_logprobs=2)
    result = engine.generate([prompt], params)[0]
    expected = oracle_logits(oracle, [*prompt, *result.token_ids]).log_softmax(-1)
    assert result.prompt_logprobs[0] is None
    entries = [*result.prompt_logprobs[1:], *result.logprobs]
    assert [entry.token_id for entry in entries] == [*prompt[1:], *result.token_ids]
    for position, entry in enumerate(entries):
        count = 2 if position < len(prompt) - 1 else 3
        best = expected[position].topk(count)
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=TOLERANCE)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def test_the_first_token_of_a_prompt_has_no_logprob_even_alone(engine: Engine) -> None:
    assert engine.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs == (None,)


def test_logprobs_go_to_the_requests_that_asked_for_them(engine: Engine) -> None:
    """The rows of a step that report are not its first ones."""
    prompts = random_prompts([5, 9, 6, 8], 512, seed=6)
    silent, asking = SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, logprobs=1)
    results = engine.generate(prompts, [silent, asking, silent, asking])
    assert [result.logprobs is None for result in results] == [True, False, True, False]
    for result in (results[1], results[3]):
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        for entry in result.logprobs:  # greedy: the token is the likeliest one
            assert entry.top == ((entry.token_id, entry.logprob),)


def test_the_logits_of_a_long_prompt_are_held_a_few_rows_at_a_time(engine, monkeypatch) -> None:
    """At the published vocabulary the logits of 100 000 tokens would take 80 GB."""
    rows = []
    right = engine.model.logits
    monkeypatch.setattr(engine.model, "logits", lambda hidden: (rows.append(len(hidden)), right(hidden))[1])
    engine.generate([[1] * 600], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert rows == [256, 256, 88, 1]


# Wrong input


@pytest.mark.parametrize("prompt", [[], [1, 512], [-1], [1.5], 7, [1] * 4000])
def test_a_prompt_that_cannot_run_is_refused(engine: Engine, prompt: object) -> None:
    with refused("prompt"):
        engine.generate([[1], prompt], SamplingParams(max_tokens=1))
    assert is_idle(engine)


def test_one_text_instead_of_a_list_is_not_taken_for_a_list_of_letters(engine: Engine) -> None:
    with refused("prompts"):
        engine.generate("alpha")


def test_params_must_match_the_prompts(engine: Engine) -> None:
    assert engine.generate([]) == []
    with refused("params"):
        engine.generate([[1], [2]], [SamplingParams()])
    for name in ("logprobs", "prompt_logprobs"):
        with refused(name):
            engine.generate([[1]], SamplingParams(**{name: 513}))
    (entry,) = engine.generate([[1]], SamplingParams(max_tokens=1, logprobs=512))[0].logprobs
    assert {token for token, _ in entry.top} == set(range(512))


# Failures on the way


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_infinite_logit_is_an_error_though_it_could_be_chosen(tmp_path: Path, temperature: float) -> None:
    write_random_checkpoint(tmp_path, layers=1)
    engine = Engine(tmp_path, num_blocks=20)
    engine.model.lm_head[7] = 0
    engine.model.lm_head[7, 0] = math.inf
    assert not engine.model.head(torch.randn(4, engine.config.hidden_size, dtype=torch.bfloat16)).isnan().any()
    with pytest.raises(NonFiniteLogits):
        engine.generate([[1, 2]], SamplingParams(max_tokens=1, temperature=temperature))


def test_nan_weights_are_an_error_and_leave_the_engine_empty(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, layers=1)
    engine = Engine(tmp_path, num_blocks=20)
    engine.model.norm[3] = math.nan
    with pytest.raises(NonFiniteLogits):
        engine.generate([[1, 2], [3]], SamplingParams(max_tokens=3, temperature=1.0))
    assert is_idle(engine)


def test_an_interrupted_call_leaves_no_request_behind(engine: Engine) -> None:
    def interrupt(requests: Sequence[Request]) -> None:
        if requests[0].num_generated == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=10), on_step=interrupt)
    assert is_idle(engine)
    before = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10))
    assert before == engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("weights", "expected"), [("auto", "float32"), ("bf16", "float32"), ("mxfp4", "mxfp4"), ("fp8", "float8_e4m3fn")]
)
def test_experts_reach_their_kernel_in_the_format_asked_for(tmp_path, monkeypatch, weights, expected, streamed) -> None:
    """A CPU computes the same with either, so the test compares the format; "bf16" is floats in the dtype."""
    config = write_random_checkpoint(tmp_path, layers=2, mxfp4=True)
    formats = []
    right = assembly.prepare_experts
    monkeypatch.setattr(assembly, "prepare_experts", lambda w, **o: (formats.append(w.format), right(w, **o))[1])
    tensors = iterate_tensors(tmp_path, config, dtype=torch.float32, progress=False) if streamed else None
    Engine(tmp_path, dtype="float32", num_blocks=1, weights=weights, tensors=tensors)
    assert formats == [expected] * 2


def test_the_cache_is_no_larger_than_the_batch_can_use(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, layers=1, max_positions=100)
    assert Engine(tmp_path, max_batch_size=3).scheduler.allocator.num_blocks == 3 * 7


def test_the_dtype_follows_the_checkpoint(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        write_random_checkpoint(tmp_path / dtype, layers=1, dtype=dtype)
        engine = Engine(tmp_path / dtype, num_blocks=1)
        assert str(engine.model.dtype) == f"torch.{dtype}"
        assert engine.logits([1, 2]).dtype == torch.float32  # whatever they were computed in


WITHOUT_CHATS = """
import sys
sys.modules.update(dict.fromkeys(("openai_harmony", "npu_gptoss.harmony")))
from npu_gptoss.engine import Engine, SamplingParams
engine = Engine(sys.argv[1], dtype="float32", num_blocks=20)
print(len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids))
"""


def test_the_engine_knows_no_chat_format(directory: Path) -> None:
    """Tokens in, tokens out: it computes where harmony and the formatter of chats cannot be imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_CHATS, str(directory)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_an_error_in_a_step_cancels_the_requests_under_way_and_the_waiting(engine, prompts, monkeypatch) -> None:
    running = engine.add_request(prompts[0], SamplingParams(max_tokens=9))
    engine.step()
    waiting = engine.add_request(prompts[1], SamplingParams(max_tokens=9))
    monkeypatch.setattr(engine.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [request.finish_reason for request in (running, waiting)] == ["cancelled", "cancelled"]
    assert not engine.busy
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_blocks
