"""Every registered MoE kernel that runs here, against the definition; and that the check notices mistakes."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch
import torch.nn.functional as F

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import current_platform, load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import ExpertWeights, expert_mlp, prepare_experts, route, small_ops
from npu_gptoss.moe.activation import activation_name
from npu_gptoss.verify.moe_cases import local_share
from tests.moe.cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, check, make_layer
from tests.refused import refused
from tests.tolerances import assert_close

load_kernels()


KERNELS = [
    kernel.name
    for kernel in registry.kernels.values()
    if (kernel.family, kernel.mode) == ("moe", "experts")
    and kernel.solution != "reference"
    and not kernel.capability.reasons_against(current_platform())
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_experts_without_tokens_are_never_multiplied(kernel):
    """Their weights and biases are NaN here, and 0 * NaN is NaN."""
    layer = make_layer(17, one_expert=True)
    tensors = {name: value.clone() for name, value in vars(layer.weights).items() if isinstance(value, torch.Tensor)}
    for tensor in tensors.values():
        tensor[TOP_K:] = float("nan")
    spoilt = dataclasses.replace(layer.weights, **tensors)
    check(lambda at: at.run(kernel, spoilt), layer)


@pytest.mark.parametrize("kernel", [*KERNELS, "reference"])
def test_shares_of_all_ranks_add_up_to_the_whole(kernel):
    layer = make_layer(33)
    total = sum(layer.run(kernel, local_share(layer.weights, i, i + 2)) for i in range(0, EXPERTS, 2))
    assert_close(total, layer.run(kernel), scale=4)  # four partial sums instead of one


def test_rows_of_foreign_experts_that_hold_nan_do_not_reach_the_sum(monkeypatch):
    """Rows that are never computed hold undefined values, and 0 * NaN is NaN."""
    original = small_ops.grouped_matmul

    def poisoned(rows, weight, counts):
        out = original(rows, weight, counts)
        out[int(counts.sum()) :] = float("nan")
        return out

    monkeypatch.setattr(small_ops, "grouped_matmul", poisoned)
    layer = make_layer(33)
    share = local_share(layer.weights, 2, 5)
    check(lambda at: at.run("small_ops", share), layer, share)


@pytest.mark.parametrize("torch_groups", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(6, 8), (8, 6), (20, 12), (64, 64)])
def test_groups_of_any_size_meet_their_own_weight(monkeypatch, rows, columns, dtype, torch_groups):
    """torch's product wants rows that start at multiples of 16 bytes, and says "strides should be multiple of 16";
    older releases have none for a CPU, and on accelerators it takes some shapes only."""
    if not torch_groups:
        monkeypatch.setattr(small_ops, "_grouped_mm", None)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(8, rows, generator=generator).to(dtype)
    weight = torch.randn(5, rows, columns, generator=generator).to(dtype)
    got = small_ops.grouped_matmul(left, weight, torch.tensor([2, 0, 1, 0, 4]))
    for row, group in enumerate([0, 0, 2, 4, 4, 4, 4]):  # the last row is in no group
        assert_close(got[row], (left[row].float() @ weight[group].float()).to(dtype))


def test_definition_equals_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    layer = make_layer(21)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    theirs = GptOssMLP(config).float().eval()
    with torch.no_grad():
        theirs.router.weight.copy_(torch.randn(EXPERTS, HIDDEN) * 0.1)
        theirs.router.bias.copy_(torch.randn(EXPERTS))
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            getattr(theirs.experts, name).copy_(getattr(layer.weights, name))
        want = theirs(layer.hidden_states[None])[0][0]
        layer.logits = F.linear(layer.hidden_states, theirs.router.weight, theirs.router.bias)
    assert_close(layer.run("reference"), want, scale=4)  # sums of 96 products of magnitude ten


class TheirActivation(enum.Enum):
    SWIGLUOAI = "swigluoai"
    SILU = "silu"


def test_both_spellings_of_the_activation_are_known():
    """vLLM changed the string to an enum; upstream's comparison stopped matching and garbled three releases."""
    assert activation_name("swigluoai") == activation_name(TheirActivation.SWIGLUOAI) == "swigluoai"


@pytest.mark.parametrize("activation", ["silu", "swiglu", "SwigluOAI", "", None, TheirActivation.SILU, 7])
def test_an_unknown_activation_is_an_error_not_a_guess(activation):
    with refused("activation"):
        prepare_experts(make_layer(1).weights, activation=activation)


@pytest.mark.parametrize("kernel", ["small_ops", "reference"])
def test_equal_outputs_of_all_experts_come_out_unchanged(kernel):
    """The weights sum to one in fp32; rounded to bfloat16 first they would not."""
    layer = make_layer(200, torch.bfloat16)
    same = dataclasses.replace(
        layer.weights,
        down_proj=torch.zeros_like(layer.weights.down_proj),
        down_proj_bias=torch.ones_like(layer.weights.down_proj_bias),
    )
    assert bool((layer.run(kernel, same) == 1).all())


def test_misshapen_weights_and_calls_are_refused_in_words():
    weights = make_layer(1).weights
    with refused("down_proj"):
        dataclasses.replace(weights, down_proj=weights.down_proj.transpose(1, 2))
    with refused("gate_up_proj_bias"):
        dataclasses.replace(weights, gate_up_proj_bias=None)
    with refused("gate_up_proj"):
        ExpertWeights(torch.zeros(2, 4, 3), *(torch.zeros(1),) * 3)
    prepared = prepare_experts(weights)
    routing = route(torch.randn(3, EXPERTS), TOP_K)
    with refused("hidden_states"):
        expert_mlp(torch.zeros(3, 32), prepared, *routing)
    with refused("hidden_states"):
        expert_mlp(torch.zeros(3, HIDDEN, 1), prepared, *routing)
    with refused("topk_ids"):
        expert_mlp(torch.zeros(2, HIDDEN), prepared, *routing)
    with refused("topk_weights"):
        expert_mlp(torch.zeros(3, HIDDEN), prepared, routing[0][:, :3], routing[1])
    for top_k in (0, 9):
        with refused("top_k"):
            route(torch.zeros(2, EXPERTS), top_k)


def test_float16_experts_are_refused_with_the_dtypes_that_work():
    with pytest.raises(InputError, match="needs bfloat16 or float32 hidden, got float16"):
        prepare_experts(make_layer(1, torch.float16).weights)
