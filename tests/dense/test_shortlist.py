"""A token by its shortlist is the token of all logits: no bound is too tight, ties and damage come out as defined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_gptoss.dense import Shortlist, reference
from npu_gptoss.dense.shortlist import INPUTS, TOKENS
from tests.triton import INTERPRETED, TRITON_HERE

ROWS, HIDDEN, VOCAB = 3, 200, 9000  # more tokens than one program multiplies in full, and no multiple of a tile
DEVICE = "cpu" if INTERPRETED else "cuda"


def floats(*shape: int, seed: int) -> torch.Tensor:
    """On the CPU in float32: the interpreter does not round to bfloat16 as a GPU does."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return drawn.bfloat16() if DEVICE == "cuda" else drawn


def uneven(seed: int) -> torch.Tensor:
    """Rows of lm_head of different sizes, some of their values far larger than the others."""
    weight = floats(VOCAB, HIDDEN, seed=seed)
    weight *= torch.exp(floats(VOCAB, 1, seed=seed + 1))
    weight[::7, 11] *= 30
    return weight


def outputs(seed: int) -> torch.Tensor:
    """One row holds a value far larger than the others."""
    normed = floats(ROWS, HIDDEN, seed=seed)
    normed[1, 40] = 900.0
    return normed


def bounds(normed: torch.Tensor, shortlist: Shortlist) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper bounds [rows, vocab], and the largest lower bound of each row."""
    from npu_gptoss.dense.triton import shortlist as kernels
    from npu_gptoss.kernels.triton_launch import launch

    padded, blocks = shortlist.rows.shape[1], -(-VOCAB // TOKENS)
    halves = torch.empty(32, padded, dtype=torch.int8, device=DEVICE)
    norms, upper, lower = (torch.empty(ROWS, n, device=DEVICE) for n in (4, VOCAB, blocks))
    sizes = {"PADDED": padded, "BLOCK_T": 16}
    launch(kernels.split_kernel, (ROWS,), (normed, halves, norms), warps=4, HIDDEN=HIDDEN, BLOCK=256, **sizes)
    read = (shortlist.rows, shortlist.bounds, halves, norms, upper, upper, lower, ROWS)
    tiles = {"BLOCK_V": TOKENS, "BLOCK_K": INPUTS, "STAGES": 2, "VOCAB": VOCAB, "HAS_NOISE": False}
    launch(kernels.bounds_kernel, (blocks,), read, warps=4, **tiles, **sizes)
    return upper, lower.amax(1)


def holds(normed: torch.Tensor, weight: torch.Tensor, shortlist: Shortlist) -> bool:
    exact = normed.double() @ weight.double().T
    upper, lower = bounds(normed, shortlist)
    return bool((exact <= upper).all() and (exact.amax(1) >= lower).all())


@TRITON_HERE
def test_no_logit_is_above_its_bound_and_no_largest_below() -> None:
    weight, normed = uneven(0), outputs(2)
    shortlist = Shortlist.of(weight)
    assert holds(normed, weight, shortlist)
    upper, lower = bounds(normed, shortlist)
    assert 1 <= (upper >= lower[:, None]).sum(1).max() < VOCAB / 50, "a shortlist of so many saves nothing"
    tight = shortlist.bounds.clone()
    tight[:, 1] = 0
    assert not holds(normed, weight, replace(shortlist, bounds=tight)), "the error of eight bits counts"


def token(normed: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None = None) -> list[int]:
    from npu_gptoss.dense.triton.launches import token as by_shortlist

    return by_shortlist(normed, weight, Shortlist.of(weight), noise).tolist()


def defined(normed: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor | None = None) -> list[int]:
    return reference.token(normed, weight, Shortlist.of(weight), noise).tolist()


@TRITON_HERE
@pytest.mark.parametrize("drawn", [False, True])
def test_a_shortlist_gives_the_token_of_all_logits(drawn: bool) -> None:
    for seed in range(0, 30, 10):
        weight, normed = uneven(seed), outputs(seed + 2)
        noise = floats(ROWS, VOCAB, seed=seed + 3).float() * 20 if drawn else None
        assert token(normed, weight, noise) == defined(normed, weight, noise)


@TRITON_HERE
def test_the_first_of_equal_tokens_wins_and_damage_is_reported() -> None:
    weight, normed = floats(VOCAB, HIDDEN, seed=1), floats(ROWS, HIDDEN, seed=2)
    weight[[8900, 130, 4100]] = 2 * normed[0] + weight[0]
    weight[77] = 3 * normed[1]
    normed[2, 5] = torch.nan
    assert token(normed, weight) == [130, 77, -1]


@TRITON_HERE
def test_other_weights_replace_the_shortlist_in_place() -> None:
    shortlist, other = Shortlist.of(uneven(0)), uneven(5)
    places = shortlist.rows.data_ptr(), shortlist.bounds.data_ptr()
    shortlist.write(other)
    fresh = Shortlist.of(other)
    assert torch.equal(shortlist.rows, fresh.rows)
    assert torch.equal(shortlist.bounds, fresh.bounds)
    assert (shortlist.rows.data_ptr(), shortlist.bounds.data_ptr()) == places
