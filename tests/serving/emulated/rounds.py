"""Prompts for the engines on the emulated 910B, and the comparison of their answers.

A *round* is one call of `generate`: prompts that run together, perhaps with a mistake of `spoils.py`. In the
diagnostic mode the emulated operators take float32, so that a mistake cannot hide in bfloat16's rounding: then the
log-probabilities must be transformers' to 1e-4.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import torch

from tests.oracle import random_prompts

VOCABULARY = 96
TOLERANCE = 1e-4  # of log-probabilities, in float32
TOKENS = 5

LENGTHS = (1, 2, 5, 127, 128, 129, 300, 700)
ONE_CHUNK_BEYOND_HALF_THE_MASK = (1500,)  # 1100 tokens a step
THREE_IN_A_BUCKET_OF_FOUR = (140, 7, 260)
SPOILT = (250, 131, 40)  # beyond the window, so that lengths matter

WORKSPACE = {"tnd_max_workspace": True}  # R37 off
EAGER = {"enforce_eager": True}
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
FULL = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    return random_prompts(lengths, VOCABULARY, seed)


def turn(lengths: tuple[int, ...], *, seed: int = 1, tokens: int = TOKENS, spoil: str | None = None) -> dict[str, Any]:
    return {"prompts": prompts(lengths, seed), "tokens": tokens, "spoil": spoil}


def errors(rounds: list[dict[str, Any]], results: list[Any], expected: Any) -> list[list[torch.Tensor]]:
    """For each round and prompt |got - wanted| [tokens, vocabulary]."""
    assert len(rounds) == len(results)
    found = []
    for asked, said in zip(rounds, results, strict=True):
        assert isinstance(said, list), said
        found.append(
            [
                (torch.tensor(answer["logprobs"]) - expected(tuple(prompt), tuple(answer["tokens"]))).abs()
                for prompt, answer in zip(asked["prompts"], said, strict=True)
            ]
        )
    return found


def worst(of_round: list[torch.Tensor]) -> float:
    return max(float(error.nan_to_num(nan=1e9).max()) for error in of_round)


def right(rounds: list[dict[str, Any]], results: list[Any], expected: Any) -> list[bool]:
    """Returns True for each round that was answered as transformers answers it in float32."""
    return [worst(of_round) < TOLERANCE for of_round in errors(rounds, results, expected)]


def counts(printed: str) -> list[dict[str, Any]]:
    """What `on_ascend.count_replays` had counted when an engine had started and after each round."""
    return [json.loads(line.removeprefix("GRAPHS ")) for line in printed.splitlines() if line.startswith("GRAPHS ")]


def graphs(printed: str) -> tuple[list[int], list[int]]:
    """How many an engine had captured when it had started and after each round; how many each round replayed."""
    found = counts(printed)
    replayed = [after["replayed"] - before["replayed"] for before, after in pairwise(found)]
    return [count["captured"] for count in found], replayed


def steps(printed: str, mode: str) -> list[int]:
    """How many steps each round ran in one graph ("FULL"), in pieces ("PIECEWISE") or without one ("NONE"); or their
    rows of "padding". Of vllm-ascend 0.23."""
    return [after["steps"][mode] - before["steps"][mode] for before, after in pairwise(counts(printed))]
