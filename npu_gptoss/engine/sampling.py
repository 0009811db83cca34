"""From logits to tokens: greedy, or drawn from the distribution after temperature, top-k and top-p.

A draw is one uniform number that depends on the request's seed and on how many tokens it has generated, on nothing
else; it picks from the distribution function over the tokens in order of descending probability. So a request gets
the same tokens alone, in a batch, and after a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from npu_gptoss.engine.request import SamplingParams, TokenLogprobs


def uniform(seed: int, index: int) -> float:
    """The draw in [0, 1) for a request's generated token number `index`, from 0."""
    return random.Random(f"{seed}/{index}").random()


def choose(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> torch.Tensor:
    """logits [rows, vocab] float32, one SamplingParams and one draw a row -> token ids [rows] int64."""
    chosen = logits.argmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if rows:
        sampled = _sample(logits[rows], [params[row] for row in rows], [draws[row] for row in rows])
        chosen[rows] = sampled
    return chosen


def _sample(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> torch.Tensor:
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    # the maximum goes first, so that a tiny temperature cannot turn logits into infinities of one sign
    tempered = (logits - logits.amax(dim=-1, keepdim=True)) / column([p.temperature for p in params])
    tempered, ids = tempered.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = column([p.top_k or logits.shape[-1] for p in params])
    probabilities = tempered.masked_fill(rank >= top_k, float("-inf")).softmax(dim=-1)
    # the smallest set whose probability reaches top_p: a token stays while those before it have not reached it
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= column([p.top_p for p in params]), 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    position = (cumulative <= column(draws) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # a draw that rounds to 1 must not leave the set
    return ids.gather(-1, torch.minimum(position, last)).squeeze(-1)


def report(logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """logits [rows, vocab] float32, chosen [rows], how many top tokens a row reports -> the log-probabilities."""
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(max(counts), dim=-1)
    own = logprobs.gather(-1, chosen[:, None]).squeeze(-1).tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for token, logprob, row_ids, row_values, count in zip(
            chosen.tolist(), own, ids.tolist(), values.tolist(), counts, strict=True
        )
    ]
