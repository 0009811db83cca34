"""YaRN equals transformers bit for bit. tests/verify/test_mistakes.py compares it with the paper's definition."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.dense.small_ops import apply_rotary
from npu_gptoss.model.config import YarnScaling
from npu_gptoss.model.rope import cos_sin_cache, rotation_cache, score_scale, yarn_inv_freq
from tests.model.published import gpt_oss_20b, published_config


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("head_dim", [2, 16, 64, 128])
@pytest.mark.parametrize(
    ("factor", "trained", "theta"),
    [(32.0, 4096, 150_000.0), (8.0, 64, 150_000.0), (1.0, 4096, 150_000.0), (32.0, 4, 150_000.0), (32.0, 4096, 10.0)],
)
def test_frequencies_equal_transformers_bit_for_bit(truncate, head_dim, factor, trained, theta) -> None:
    """Context and base put the ends of the ramp before the first pair, among the pairs, and behind the last."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = dataclasses.replace(
        gpt_oss_20b(), head_dim=head_dim, rope_theta=theta, rope_scaling=YarnScaling(factor, trained, 32, 1, truncate)
    )
    theirs = SimpleNamespace(
        rope_theta=config.rope_theta,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_scaling={"rope_type": "yarn", **dataclasses.asdict(config.rope_scaling)},
    )
    inv_freq, scale = yarn_inv_freq(config)
    want, want_scale = utils._compute_yarn_parameters(theirs, "cpu")
    assert torch.equal(inv_freq, want)
    assert scale == want_scale
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == (head_dim // 2,)


def test_cache_is_computed_on_the_cpu_whatever_the_default_device() -> None:
    """A loader makes the accelerator the default device, whose own cosines would differ in the last bits."""
    config = gpt_oss_20b()
    with torch.device("meta"):
        cache = cos_sin_cache(config, 50, torch.float32)
    assert torch.equal(cache, cos_sin_cache(config, 50, torch.float32))


def test_cache_equals_transformers_rotary_embedding() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    hub = transformers.GptOssConfig.from_dict(published_config())
    positions = torch.tensor([0, 1, 127, 128, 4095, 4096, 70000, 131071])
    cache = cos_sin_cache(gpt_oss_20b(), 131072, torch.float32)[positions]
    cos, sin = GptOssRotaryEmbedding(hub)(torch.zeros(1, dtype=torch.float32), positions[None])
    assert torch.equal(cache, torch.cat([cos[0], sin[0]], dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

    torch.manual_seed(0)
    x = torch.randn(7, 3, 64).to(dtype)
    cos, sin = cos_sin_cache(gpt_oss_20b(), 7, dtype).chunk(2, dim=-1)
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    got = apply_rotary(x, cos, sin)
    assert got.dtype == dtype
    assert torch.equal(got, want[0].transpose(0, 1))


def test_rotation_with_float32_tables_is_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 64).bfloat16()
    cos, sin = cos_sin_cache(gpt_oss_20b(), 7, torch.float32).chunk(2, dim=-1)
    assert torch.equal(apply_rotary(x, cos, sin), apply_rotary(x.float(), cos, sin).bfloat16())


def score_slope(table: torch.Tensor, scale: float, distance: int) -> float:
    """The least-squares slope of scores of random bf16 heads, rotated into bf16 by a bf16 table, against fp32."""
    config, positions = gpt_oss_20b(), len(table)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(positions, 1, 64, generator=generator).bfloat16().float() for _ in range(2))

    def scores(table: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        cos, sin = table.float().chunk(2, dim=-1)
        q, k = (apply_rotary(heads, cos, sin).to(dtype).double() for heads in (query, key))
        return (q[distance:] * k[: positions - distance]).sum(-1) * scale

    want = scores(cos_sin_cache(config, positions, torch.float32), config.head_dim**-0.5, torch.float32)
    got = scores(table, scale, torch.bfloat16)
    return float((got * want).sum() / (want * want).sum())


@pytest.mark.parametrize("distance", [1, 128, 3000])
def test_scores_in_bf16_are_not_systematically_small(distance: int) -> None:
    config = gpt_oss_20b()
    table = rotation_cache(config, 6000, torch.bfloat16)
    assert abs(score_slope(table, score_scale(config), distance) - 1) < 5e-4
    in_the_table = cos_sin_cache(config, 6000, torch.bfloat16)  # as transformers has it
    assert score_slope(in_the_table, config.head_dim**-0.5, distance) < 1 - 1e-3
