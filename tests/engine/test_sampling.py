"""Sampling cuts the right tokens off, follows the distribution, and does not depend on the rest of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from npu_gptoss.engine.request import SamplingParams
from npu_gptoss.engine.sampling import choose, report, uniform

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = PROBABILITIES.log()
BY_LIKELIHOOD = [1, 3, 4, 0, 2]


def draw_many(count: int, **settings: float) -> torch.Tensor:
    """Frequencies of the tokens over an even grid of draws, which makes them exact."""
    params = [SamplingParams(**{"temperature": 1.0, **settings})] * count
    draws = [(i + 0.5) / count for i in range(count)]
    return choose(LOGITS.expand(count, -1), params, draws).bincount(minlength=5) / count


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert torch.allclose(draw_many(10_000, temperature=temperature), expected, atol=2e-4)


TOP_K = [({"top_k": k}, k) for k in (1, 2, 4, 5, 9)]
TOP_P = [({"top_p": p}, kept) for p, kept in ((1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (1.0, 5))]


@pytest.mark.parametrize(("options", "kept"), [*TOP_K, *TOP_P], ids=str)
def test_another_set_than_the_k_likeliest_or_the_fewest_that_reach_p(options: dict[str, float], kept: int) -> None:
    expected = torch.zeros(5)
    expected[BY_LIKELIHOOD[:kept]] = PROBABILITIES[BY_LIKELIHOOD[:kept]]
    assert torch.allclose(draw_many(10_000, **options), expected / expected.sum(), atol=2e-4)


def test_a_probability_or_a_draw_exactly_at_the_edge_belongs_to_one_side() -> None:
    """Halves are exact in floating point: a set that has reached top_p takes no more, and a draw of 1/2 passes 1/2."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()

    def chosen(draw: float, top_p: float) -> int:
        return choose(logits, [SamplingParams(temperature=1.0, top_p=top_p)], [draw]).item()

    assert [chosen(draw, 0.5) for draw in (0.0, 0.5, 0.99)] == [0, 0, 0]
    assert [chosen(draw, 0.75) for draw in (0.0, 0.66, 0.67, 0.99)] == [0, 0, 1, 1]
    assert [chosen(draw, 1.0) for draw in (0.499, 0.5, 0.749, 0.75)] == [0, 1, 1, 2]


def test_without_top_k_the_least_likely_token_of_many_can_be_drawn() -> None:
    assert choose(torch.zeros(1, 1000), [SamplingParams(temperature=1.0)], [0.9999]).item() == 999


def test_top_p_counts_the_tokens_that_top_k_left() -> None:
    """Of {0.4, 0.3} the first alone is 0.57: enough for 0.5, which it would not be of all five."""
    assert draw_many(100, top_k=2, top_p=0.5)[1] == 1
    assert draw_many(100, top_p=0.5)[1] < 1


def test_a_tiny_temperature_is_greedy_and_makes_no_infinity_of_a_logit() -> None:
    params = [SamplingParams(temperature=1e-37)]
    assert [choose(torch.tensor([[300.0, 500.0, 400.0]]), params, [draw]).item() for draw in (0.0, 0.99)] == [1, 1]


def test_a_seed_and_a_number_that_read_alike_draw_apart() -> None:
    assert uniform(1, 11) != uniform(11, 1)


def test_temperature_zero_is_the_most_likely_token_whatever_the_draw() -> None:
    assert choose(LOGITS[None].expand(3, -1), [SamplingParams()] * 3, [0.0, 0.5, 0.99]).tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature: float) -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 30
    params = [SamplingParams(temperature=temperature)] * 4
    assert choose(logits, params, [0.0, 0.3, 0.7, 0.999]).equal(logits.argmax(-1))


def test_a_small_temperature_still_draws_between_near_ties() -> None:
    logits, params = torch.tensor([[0.001, 0.0, -5.0]]), [SamplingParams(temperature=0.005)]
    share = 1 / (1 + math.exp(-0.2))  # of the first
    assert [choose(logits, params, [draw]).item() for draw in (0.0, share - 0.01, share + 0.01, 0.999)] == [0, 0, 1, 1]


def test_the_largest_draw_stays_inside_the_kept_tokens() -> None:
    """In float32 this draw is 1, beyond the whole distribution."""
    draw = math.nextafter(1.0, 0.0)
    logits = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0)) * 5
    for top_k in (1, 3, 0):
        params = [SamplingParams(temperature=1.0, top_k=top_k)]
        kept = logits.topk(top_k or logits.shape[1]).indices[0].tolist()
        assert choose(logits, params, [draw]).item() in kept
        assert choose(logits, params, [0.0]).item() == kept[0]


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 3
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=7),
        SamplingParams(temperature=2.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=100, top_p=0.9),
        SamplingParams(),
    ]
    draws = [0.1, 0.5, 0.7, 0.9, 0.3, 0.2]
    together = choose(logits, params, draws).tolist()
    alone = [choose(logits[i : i + 1], params[i : i + 1], draws[i : i + 1]).item() for i in range(6)]
    assert together == alone
    assert choose(logits.flip(0), params[::-1], draws[::-1]).tolist() == alone[::-1]


def test_draws_are_even_and_depend_on_seed_and_index_only() -> None:
    draws = torch.tensor([uniform(seed, index) for seed in range(50) for index in range(200)])
    assert ((draws >= 0) & (draws < 1)).all()
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 99.9 % quantile of chi-square with 19 degrees of freedom
    assert uniform(3, 4) == uniform(3, 4)
    assert len({uniform(3, 4), uniform(4, 3), uniform(34, 0), uniform(-3, 4)}) == 4


def test_report_gives_each_row_its_own_count() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    first, second = report(logits, torch.tensor([2, 3]), [0, 2])
    assert (first.token_id, first.top) == (2, ())
    assert first.logprob == pytest.approx(math.log(0.05), abs=1e-6)
    assert second.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in second.top] == [3, 1]
    assert [logprob for _, logprob in second.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)
