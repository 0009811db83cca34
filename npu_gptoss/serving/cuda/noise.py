"""The noise that vLLM's sampler adds to logits, apart: the kernel that takes tokens without logits adds it to bounds.

A token's noise depends on the request's seed, the position and the token alone, so both ways draw the same tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_gptoss.serving.releases.vllm import _log1p_neg_stable, murmur3_uniform32

BLOCK = 4096


@triton.jit
def _noise_kernel(requests, temperatures, seeds, positions, noise, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(requests + row).to(tl.int64)
    drawn = murmur3_uniform32(tl.load(seeds + request), tl.load(positions + row), at)
    value = -tl.log(-_log1p_neg_stable(drawn))
    greedy = tl.load(temperatures + request) == 0.0
    tl.store(noise + row * VOCAB + at, tl.where(greedy, 0.0, value), mask=at < VOCAB)


def gumbel_noise(
    requests: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, vocab: int
) -> torch.Tensor:
    """[rows, vocab] float32, zeros for a greedy request.

    requests: [rows], the request of each row; temperatures, seeds: a value a request; positions: [rows].
    """
    rows = len(positions)
    noise = torch.empty(rows, vocab, dtype=torch.float32, device=positions.device)
    grid = rows, triton.cdiv(vocab, BLOCK)
    _noise_kernel[grid](requests, temperatures, seeds, positions, noise, VOCAB=vocab, BLOCK=BLOCK)
    return noise
