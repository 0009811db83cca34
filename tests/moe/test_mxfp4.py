"""MXFP4: edges of its range, seams, views and refusals. tests/verify/test_mistakes.py compares every code and tie."""

from __future__ import annotations

import math

import pytest
import torch

from npu_gptoss.moe import mxfp4
from npu_gptoss.moe.mxfp4 import E2M1, Mxfp4Error, compress, expand, expand_transposed
from tests.refused import refused

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compares -0.0 with 0.0 as different."""
    return tensor.view(INTEGERS[tensor.dtype])


def random_pair(*shape: int, low: int = 1, high: int = 250) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scale", "largest"), [(253, 5), (254, 3)])
def test_largest_scales_are_exact_up_to_the_range_and_refused_above(dtype, scale, largest) -> None:
    """6 * 2 ** 126 and 2 * 2 ** 127 exceed the range of bfloat16 and float32: no silent infinity."""
    scales = torch.full((1, 1), scale, dtype=torch.uint8)
    fits = torch.full((1, 1, 16), largest | (largest | 8) << 4, dtype=torch.uint8)
    want = math.ldexp(E2M1[largest], scale - 127)
    assert expand(fits, scales, dtype).double().tolist() == [[want, -want] * 16]
    with refused("scales", Mxfp4Error):
        expand(fits + 1, scales, dtype)


def test_scale_255_is_nan_and_refused() -> None:
    blocks, scales = random_pair(4, 8)
    scales[2, 3] = 255
    with refused("scales", Mxfp4Error):
        expand(blocks, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expansion_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_pair(4, 48, 3, low=0, high=253)
    want = theirs.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    got = expand_transposed(blocks, scales, dtype)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(got), bits(expand(blocks, scales, dtype).transpose(1, 2).contiguous()))


def test_chunks_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = random_pair(7, 11, 3)
    whole, packed = expand(blocks, scales), compress(expand(blocks, scales))
    monkeypatch.setattr(mxfp4, "_EXPAND_CHUNK", 16 * 5)
    monkeypatch.setattr(mxfp4, "_COMPRESS_CHUNK", 5)
    assert torch.equal(bits(expand(blocks, scales)), bits(whole))
    assert all(torch.equal(one, other) for one, other in zip(compress(whole), packed, strict=True))


def test_views_that_are_not_contiguous_are_read_in_order() -> None:
    blocks, scales = random_pair(6, 4)
    odd = expand(blocks[1::2], scales[1::2])
    assert torch.equal(odd, expand(blocks, scales)[1::2])
    turned = expand(blocks.transpose(0, 1), scales.t())
    assert torch.equal(turned.view(4, 6, 32), expand(blocks, scales).view(6, 4, 32).transpose(0, 1))
    weight = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)).t()
    assert not weight.is_contiguous()
    assert all(torch.equal(one, two) for one, two in zip(compress(weight), compress(weight.contiguous()), strict=True))


@pytest.mark.parametrize(
    ("blocks", "scales", "dtype", "field"),
    [
        ((2, 3, 16), (2, 4), torch.bfloat16, "blocks"),
        ((2, 3, 8), (2, 3), torch.bfloat16, "blocks"),
        ((16,), (), torch.bfloat16, "blocks"),
        ((2, 16), (2,), torch.float16, "dtype"),
    ],
)
def test_wrong_shapes_and_target_dtypes_are_refused(blocks, scales, dtype, field) -> None:
    with refused(field, Mxfp4Error):
        expand(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8), dtype)


def test_wrong_storage_dtypes_are_refused() -> None:
    blocks, scales = random_pair(2, 3)
    with refused("blocks", Mxfp4Error):
        expand(blocks.int(), scales)
    with refused("blocks", Mxfp4Error):
        expand_transposed(blocks, scales)


def test_no_groups_give_no_values() -> None:
    assert expand(torch.zeros(0, 3, 16, dtype=torch.uint8), torch.zeros(0, 3, dtype=torch.uint8)).shape == (0, 96)
    assert compress(torch.zeros(0, 64))[0].shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_representable_values_come_back_unchanged(dtype: torch.dtype) -> None:
    """Random groups, and for every scale each pair of neighbouring codes alone: bits, so that -0.0 stays -0.0."""
    pairs = [random_pair(64, 4, low=0, high=253)]
    codes = torch.arange(256, dtype=torch.uint8)[:, None, None].repeat(1, 253, 16)
    pairs.append((codes, torch.arange(253, dtype=torch.uint8).repeat(256, 1)))
    for blocks, scales in pairs:
        values = expand(blocks, scales, dtype)
        again = expand(*compress(values), dtype)
        assert torch.equal(bits(again), bits(values))


def test_shared_exponent_is_that_of_the_largest_magnitude() -> None:
    """OCP MX 6.3: floor(log2(largest)) - 2, so that the largest falls into [4, 8); values above 6 become 6."""
    groups = torch.zeros(6, 32)
    groups[:, 3] = torch.tensor([1.0, -1.99, 4.0, 7.99, 0.0, 3.0e38])
    blocks, scales = compress(groups)
    assert scales.flatten().tolist() == [125, 125, 127, 127, 127, 252]
    values = expand(blocks, scales, torch.float32)[:, 3].tolist()
    assert values == [1.0, -1.5, 4.0, 6.0, 0.0, math.ldexp(1.5, 127)]


def test_values_below_the_smallest_scale_round_instead_of_failing() -> None:
    groups = torch.zeros(3, 32)
    groups[0, 0] = math.ldexp(1.0, -128)  # 0.5 under scale 0
    groups[1, 0] = math.ldexp(1.0, -129)  # half of it: a tie, to zero
    groups[2, 0] = math.ldexp(1.25, -129)
    blocks, scales = compress(groups)
    assert scales.flatten().tolist() == [0, 0, 0]
    assert expand(blocks, scales, torch.float32)[:, 0].tolist() == [2.0**-128, 0.0, 2.0**-128]


def test_compression_does_not_depend_on_the_floating_type() -> None:
    torch.manual_seed(1)
    weight = torch.randn(5, 2, 64).to(torch.bfloat16)
    blocks, scales = compress(weight)
    assert (blocks.shape, scales.shape) == ((5, 2, 2, 16), (5, 2, 2))
    for other in (weight.float(), weight.half()):
        assert all(torch.equal(one, two) for one, two in zip(compress(other), (blocks, scales), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_compressing_nan_or_infinity_is_refused(value: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 40] = value
    with refused("weight", Mxfp4Error):
        compress(weight)


@pytest.mark.parametrize("shape", [(4, 33), (64, 31), ()])
def test_compressing_an_axis_without_whole_groups_is_refused(shape: tuple[int, ...]) -> None:
    with refused("weight", Mxfp4Error):
        compress(torch.zeros(shape))


def test_compressing_integers_is_refused() -> None:
    with refused("weight", Mxfp4Error):
        compress(torch.zeros(32, dtype=torch.int32))


def published_recipe(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """triton_kernels' `downcast_to_mxfp` as a search: codes `[groups, 32]` without signs, and exponents `[groups]`.

    The smallest power of two with which nothing exceeds 6; the nearest value, of two the larger.
    """
    groups = weight.to(torch.bfloat16).double().view(-1, 32).abs()
    exponents = torch.tensor([next(e for e in range(-127, 128) if group.max() <= 6 * 2.0**e) for group in groups])
    distances = (groups / torch.exp2(exponents.double())[:, None])[..., None] - torch.tensor(E2M1)
    return 7 - distances.abs().flip(-1).argmin(-1), exponents


def edges() -> torch.Tensor:
    """Every tie between two codes, largest values on both sides of 6 * 2 ** n, and zeros, `[groups, 32]` bfloat16."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(64, 32, generator=generator)
    groups[0] = 0
    groups[1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)
    for row, largest in enumerate((6, 6.03125, 5.96875, 4, 3.984375, 12, 3, 3.015625), start=2):
        groups[row] = groups[row].clamp(-1, 1)
        groups[row, 5] = -largest
    return groups.to(torch.bfloat16)


def test_published_recipe_rounds_the_scale_up_and_ties_away_from_zero() -> None:
    weight = edges()
    want, exponents = published_recipe(weight)
    blocks, scales = compress(weight, published=True)
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).view(-1, 32)
    assert torch.equal(scales.view(-1).long() - 127, exponents)
    assert torch.equal((codes & 7).long(), want)
    assert torch.equal((codes >> 3).bool(), torch.signbit(weight))


def test_the_specification_s_rule_is_not_the_published_recipe() -> None:
    weight = edges()
    assert (compress(weight)[1] != compress(weight, published=True)[1]).any()
    ties = torch.tensor([[0.25, 6] + [0.0] * 30])
    assert (compress(ties)[0][0, 0, 0], compress(ties, published=True)[0][0, 0, 0]) == (0x70, 0x71)


def test_scales_of_before_are_kept_only_where_they_are_exact() -> None:
    blocks, scales = random_pair(64, 4, low=100, high=140)
    blocks &= 0x55  # codes up to 5, so that a smaller scale would do too
    weight = expand(blocks, scales)
    for got, want in zip(compress(weight, published=True, kept=scales), (blocks, scales), strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(compress(weight, published=True)[1], scales)
    weight[0, 3] = 0.37 * weight[0, :32].abs().max()
    got, want = compress(weight, published=True, kept=scales), compress(weight, published=True)
    assert torch.equal(got[1][0, 0], want[1][0, 0])
    assert torch.equal(got[0][0, 0], want[0][0, 0])
    assert torch.equal(compress(weight, kept=torch.full_like(scales, 255))[1], compress(weight)[1])
