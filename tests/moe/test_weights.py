"""Packed experts: expansion, refusals, and portable kernels that take them and skip padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from npu_gptoss import moe
from npu_gptoss.kernels import ANY, Range, accepts, bind, platform_override, register_kernel
from npu_gptoss.kernels.registry import registering_as, registry
from npu_gptoss.moe import ExpertWeights, Fp8Experts, Mxfp4Experts, keeps_format, mxfp4, prepare_experts, quantize_fp8
from npu_gptoss.moe.weights import FP8, FP8_LARGEST
from npu_gptoss.verify.moe_cases import local_share
from tests import ascend_ops
from tests.moe.cases import EXPERTS, HIDDEN, INTERMEDIATE, make_layer
from tests.refused import refused
from tests.tolerances import assert_close

BF16 = torch.bfloat16


def packed(weights: ExpertWeights) -> Mxfp4Experts:
    gate_up = mxfp4.compress(weights.gate_up_proj.transpose(1, 2))
    down = mxfp4.compress(weights.down_proj.transpose(1, 2))
    return Mxfp4Experts(*gate_up, weights.gate_up_proj_bias, *down, weights.down_proj_bias, weights.expert_map)


def in_format(name: str, weights: ExpertWeights) -> Mxfp4Experts | Fp8Experts:
    return packed(weights) if name == "mxfp4" else quantize_fp8(weights)


def test_mxfp4_experts_expand_to_the_bits_of_the_checkpoints_expansion():
    weights = packed(make_layer(1, BF16).weights)
    expanded = weights.expand(BF16)
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = getattr(weights, name + "_blocks"), getattr(weights, name + "_scales")
        assert torch.equal(getattr(expanded, name), mxfp4.expand_transposed(blocks, scales, BF16))
        assert torch.equal(getattr(expanded, name), mxfp4.expand(blocks, scales, BF16).transpose(1, 2))


@pytest.mark.parametrize("source", ["floats", "mxfp4"])
def test_fp8_is_within_half_a_step_of_each_rows_scale(source):
    weights = make_layer(1).weights if source == "floats" else packed(make_layer(1).weights)
    floats = weights.expand(torch.float32)
    made = quantize_fp8(weights)
    back = made.expand(torch.float32)
    for name in ("gate_up_proj", "down_proj"):
        want, got = getattr(floats, name), getattr(back, name)
        scale = getattr(made, name + "_scales")[:, None, :]
        # 3 bits of mantissa: half a step is 2 ** -4 of the value; below 2 ** -6 the steps are 2 ** -9
        assert bool(((got - want).abs() <= want.abs() / 16 + scale * 2**-10 * 1.001).all())
        assert getattr(made, name).float().abs().amax().item() == FP8_LARGEST


def test_a_row_of_zeros_stays_zero_in_fp8():
    weights = make_layer(1).weights
    zeros = dataclasses.replace(weights, down_proj=weights.down_proj * 0)
    assert bool((quantize_fp8(zeros).expand(torch.float32).down_proj == 0).all())


def test_fp8_experts_are_not_quantized_again():
    made = quantize_fp8(make_layer(1).weights)
    assert quantize_fp8(made) is made


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_the_expert_map_survives_expansion(name):
    layer = make_layer(20)
    share = in_format(name, local_share(layer.weights, 2, 5))
    floats = local_share(in_format(name, layer.weights).expand(torch.float32), 2, 5)  # the map is put on afterwards
    assert_close(layer.run("small_ops", share), layer.run("reference", floats))
    assert_close(layer.run("small_ops", quantize_fp8(share)), layer.run("reference", quantize_fp8(floats)), scale=2)


def test_misshapen_packed_weights_are_refused_in_words():
    weights = make_layer(1, BF16).weights
    four, eight = packed(weights), quantize_fp8(weights)
    with refused("down_proj_scales"):
        dataclasses.replace(four, down_proj_scales=four.down_proj_scales[..., 0])
    with refused("gate_up_proj_blocks"):
        dataclasses.replace(four, gate_up_proj_blocks=four.gate_up_proj_blocks.to(torch.int16))
    with refused("gate_up_proj_blocks"):
        dataclasses.replace(four, gate_up_proj_blocks=four.gate_up_proj_blocks[0])
    with refused("down_proj"):
        dataclasses.replace(eight, down_proj=eight.down_proj.transpose(1, 2))
    with refused("gate_up_proj_scales"):
        dataclasses.replace(eight, gate_up_proj_scales=eight.gate_up_proj_scales.to(BF16))
    with refused("down_proj"):
        dataclasses.replace(eight, down_proj=eight.down_proj.to(BF16))
    with refused("down_proj_bias"):
        dataclasses.replace(eight, down_proj_bias=None)


@pytest.mark.parametrize("override", ["triton_one", "triton_few", "triton"])
@pytest.mark.parametrize("weight_format", ["mxfp4", "float8_e4m3fn"])
def test_a_kernel_asked_for_some_batches_leaves_the_experts_packed(monkeypatch, override, weight_format):
    """The other batches keep their own kernels, which take the same format; expanded it is four times as large."""
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", override.replace("triton_", "moe.experts.triton_"))
    with platform_override("cuda", frozenset({"triton"})):
        assert keeps_format(weight_format, BF16)


def test_format_is_kept_only_with_kernels_for_every_batch_size(monkeypatch):
    """Else the weights would lie there twice, packed for one size of batch and expanded for the others."""
    monkeypatch.setattr(registry, "kernels", dict(registry.kernels))

    def kernel_for(name: str, rows: Range) -> None:
        with registering_as("theirs:experts"):
            register_kernel(
                registry.operations["moe.experts"],
                solution=f"theirs_{name}",
                signatures=(accepts(hidden="bfloat16", weight="mxfp4"),),
                traits={"activation": ANY, "expert_parallel": ANY, "rows": rows},
                priority=16,
            )(len)

    with platform_override("cpu", frozenset()):
        kernel_for("many", Range(257))
        assert not keeps_format("mxfp4", BF16)
        kernel_for("few", Range(most=256))
        assert keeps_format("mxfp4", BF16)
    registry.generation += 1  # both go again


@pytest.mark.parametrize(
    ("override", "dtype"), [("small_ops", BF16), ("reference", BF16), ("no such", BF16), ("", torch.float32)]
)
def test_experts_are_expanded_where_no_fast_kernel_takes_them_packed(monkeypatch, override, dtype):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", override)
    with platform_override("cuda", frozenset({"triton"})):
        assert not keeps_format("mxfp4", dtype)
    with platform_override("ascend", frozenset({"torch_npu"})):
        assert not keeps_format("mxfp4", BF16)


def test_ascend_experts_stay_packed_only_on_request():
    """They are expanded in each step, which costs time where bfloat16 fits: the engine's auto took them since
    Triton-Ascend is installed."""
    weights = packed(make_layer(1, BF16).weights)
    with ascend_ops.ascend(), platform_override("ascend", frozenset({"torch_npu", "triton_ascend"})):
        assert not keeps_format("mxfp4", BF16)
        assert prepare_experts(weights).kernel.kernel.name == "moe.experts.ascend_packed"


def test_kernels_must_handle_experts_of_other_ranks(monkeypatch):
    asked = []

    def ask(operation, describe, kernel):
        call, traits = describe(3)
        asked.append((str(call), traits["expert_parallel"], traits["rows"], traits["pairs_per_expert"]))
        return bind(operation, describe, kernel)

    monkeypatch.setattr(moe, "bind", ask)
    weights = make_layer(1, BF16).weights
    for share, parallel in ((weights, False), (local_share(weights, 2, 5), True)):
        asked.clear()
        prepare_experts(share)
        assert asked == [("hidden bfloat16, weight bfloat16", parallel, 3, 3 * 4 / EXPERTS)]


def test_any_negative_id_is_padding():
    share = local_share(make_layer(1).weights, 2, 5)
    assert share.local_ids(torch.tensor([-1, -100, 1, 2, 4, 5])).tolist() == [-1, -1, -1, 0, 2, -1]
    first = local_share(make_layer(1).weights, 0, 3)  # padding is not its expert 0
    assert first.local_ids(torch.tensor([-1, -100, 0, 2, 3])).tolist() == [-1, -1, 0, 2, -1]


def test_a_gate_without_its_up_is_refused_in_every_format():
    """All shapes agree with one another, so that half of a pair would be dropped silently."""
    bias, down_bias, byte = torch.zeros(2, 65), torch.zeros(2, 32), torch.uint8
    with refused("gate_up_proj"):
        ExpertWeights(torch.zeros(2, 32, 65), bias, torch.zeros(2, 32, 32), down_bias)
    blocks, scales = torch.zeros(2, 65, 1, 16, dtype=byte), torch.zeros(2, 65, 1, dtype=byte)
    with refused("gate_up_proj_blocks"):
        Mxfp4Experts(blocks, scales, bias, blocks[:, :32], scales[:, :32], down_bias)
    eight = torch.zeros(2, 65, 32, dtype=FP8)
    with refused("gate_up_proj"):
        Fp8Experts(eight, torch.zeros(2, 65), bias, eight[:, :32], torch.zeros(2, 32), down_bias)


def test_all_formats_say_their_sizes_alike():
    weights = make_layer(1, BF16).weights
    for each in (weights, packed(weights), quantize_fp8(weights)):
        sizes = (each.num_experts, each.hidden_size, each.intermediate_size, each.dtype)
        assert sizes == (EXPERTS, HIDDEN, INTERMEDIATE, BF16)
    assert [each.format for each in (weights, packed(weights), quantize_fp8(weights))] == [
        "bfloat16",
        "mxfp4",
        "float8_e4m3fn",
    ]
    assert quantize_fp8(weights).down_proj.dtype == FP8
