"""Rotary position embedding with YaRN, equal to the training of gpt-oss.

Maths: YaRN (Peng et al., 2309.00071, "NTK by parts"), as in openai/gpt-oss `torch/model.py` and in transformers'
`_compute_yarn_parameters`, which this file equals bit for bit. A frequency whose wave fits the original context often
(`beta_fast` turns) is kept, one that fits rarely (`beta_slow` turns) is divided by `factor`, and between the two a ramp
over the *index of the dimension* blends them. The published checkpoints say `truncate: false`: the ends of the ramp
(about 8.1 and 17.4 of 32) stay fractional. Rounded to 8 and 18 they shift nine frequencies, the slowest of them by
three quarters: a systematic error that no short answer betrays.
"""

from __future__ import annotations

import math

import torch

from npu_gptoss.model.config import GptOssConfig


def yarn_inv_freq(config: GptOssConfig) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair of dimensions, and the factor that scales cos and sin.

    Returns `[head_dim / 2]` float32 in radians a position, on the CPU, and `0.1 ln(factor) + 1` (1 for factor 1).
    """
    yarn = config.rope_scaling
    dim, base = config.head_dim, config.rope_theta

    def index_with(turns: float) -> float:
        """The (fractional) pair whose wave turns this often over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_with(yarn.beta_fast), index_with(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no ramp, a step; as in transformers
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp

    wavelength = base ** (torch.arange(0, dim, 2).float() / dim)  # positions a radian
    inv_freq = 1.0 / (yarn.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept
    return inv_freq, 0.1 * math.log(yarn.factor) + 1.0


def cos_sin_cache(
    config: GptOssConfig, num_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The table that vLLM calls cos_sin_cache: row p holds position p's cosines, then its sines, times the factor.

    Returns `[num_positions, head_dim]`. Computed in float32 on the CPU, so that every device rotates by the same
    numbers; then cast to `dtype` and moved.
    """
    return _table(config, num_positions, yarn_inv_freq(config)[1]).to(dtype).to(device)


def rotation_cache(config: GptOssConfig, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """The same table without the factor: plain rotations, for scores that are scaled by `score_scale`.

    In bfloat16 the factor 1.34657 becomes 1.34375 in each cosine near 1, which most of them are at low frequencies:
    scores come out 0.16 % small at every distance. Rotations round without a slope (tests/model/test_rope.py).
    """
    return _table(config, num_positions, 1.0).to(dtype)


def score_scale(config: GptOssConfig) -> float:
    """The factor of the scores of queries and keys that `rotation_cache` rotated: head_dim ** -0.5 * factor ** 2."""
    return config.head_dim**-0.5 * yarn_inv_freq(config)[1] ** 2


def _table(config: GptOssConfig, num_positions: int, factor: float) -> torch.Tensor:
    with torch.device("cpu"):  # also where a loader has made an accelerator the default device
        inv_freq, _ = yarn_inv_freq(config)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
