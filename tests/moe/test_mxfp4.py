"""MXFP4: every code under every scale, the nibble order, the rounding, and the refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from npu_gptoss.moe import mxfp4
from npu_gptoss.moe.mxfp4 import E2M1, Mxfp4Error, compress, expand, expand_transposed
from tests.refused import refused

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compares -0.0 with 0.0 as different."""
    return tensor.view(INTEGERS[tensor.dtype])


def by_definition(blocks: torch.Tensor, scales: torch.Tensor) -> list[float]:
    """Sign, magnitude and scale of one value after the other, low nibble first, in double precision."""
    values = []
    for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist(), strict=True):
        for code in itertools.chain.from_iterable((byte & 15, byte >> 4) for byte in block):
            magnitude = math.ldexp((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7], scale - 127)
            values.append(-magnitude if code & 8 else magnitude)
    return values


def every_byte_under_every_scale(scales: range) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(len(scales), 1, 1)
    return blocks, torch.tensor(list(scales), dtype=torch.uint8)[:, None].repeat(1, 16)


def random_pair(*shape: int, low: int = 1, high: int = 250, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_under_every_scale_is_exact(dtype: torch.dtype) -> None:
    """Scales 0 to 252, subnormals included; the comparison is in double precision and of bits."""
    blocks, scales = every_byte_under_every_scale(range(253))
    got = expand(blocks, scales, dtype)
    want = torch.tensor(by_definition(blocks, scales), dtype=torch.float64).view_as(got)
    assert torch.equal(got.double(), want)
    assert torch.equal(bits(got), bits(want.to(dtype)))
    assert got.shape == (253, 16 * 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scale", "largest"), [(253, 5), (254, 3)])
def test_largest_scales_are_exact_up_to_the_range_and_refused_above(
    dtype: torch.dtype, scale: int, largest: int
) -> None:
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


def check_against_definition(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    blocks, scales = random_pair(3, 5, low=110, high=130)
    want = torch.tensor(by_definition(blocks, scales))
    assert torch.equal(function(blocks, scales).flatten().float(), want)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda blocks, scales: expand(blocks >> 4 | blocks << 4, scales),  # nibbles swapped: plausible garbage
        lambda blocks, scales: expand(blocks, scales + 1),  # a bias of 126
        lambda blocks, scales: expand(blocks.flip(-1), scales),
        lambda blocks, scales: expand(blocks ^ 0x80, scales),  # a sign
    ],
)
def test_swapped_nibbles_and_other_mutants_are_noticed(mutant: Callable) -> None:
    check_against_definition(expand)
    with pytest.raises(AssertionError):
        check_against_definition(mutant)


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
def test_wrong_shapes_and_target_dtypes_are_refused(
    blocks: tuple[int, ...], scales: tuple[int, ...], dtype: torch.dtype, field: str
) -> None:
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


def nearest(value: float, scale: int) -> float:
    """Brute force: the closest representable value, a tie to the even code."""
    candidates = [(abs(abs(value) - math.ldexp(m, scale - 127)), code % 2, m) for code, m in enumerate(E2M1)]
    return math.copysign(math.ldexp(min(candidates)[2], scale - 127), value)


def test_compression_takes_the_nearest_value_and_ties_go_to_the_even_code() -> None:
    torch.manual_seed(0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.9, 4.0])
    beside = torch.cat([ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0))])[:30]
    groups = torch.cat([torch.randn(60, 32), torch.zeros(2, 32)])
    groups[60, :27], groups[61, :27] = beside, -beside
    groups[60, 31] = groups[61, 31] = 4.0  # the group's exponent
    blocks, scales = compress(groups)
    got = expand(blocks, scales, torch.float32)
    assert scales[60:].tolist() == [[127], [127]]
    for group, scale, values in zip(groups.tolist(), scales.flatten().tolist(), got.tolist(), strict=True):
        assert values == [nearest(value, scale) for value in group]


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
