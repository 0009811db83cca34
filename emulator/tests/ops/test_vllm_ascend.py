"""vllm-ascend 0.23's own operators, and the Triton kernel of each step."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import use
from ascend_emulator.ops import OPS
from ascend_emulator.ops.slots import compute_slot_mapping
from ascend_emulator.rules import ContractError

norm = OPS["_C_ascend::npu_add_rms_norm_bias"]
gate = OPS["_C_ascend::moe_gating_top_k"]


def gated(logits: torch.Tensor, renorm: int, norm_type: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return gate(logits, 4, 1, 1, 1, renorm, norm_type, False, 1.0, 1e-20)[:2]


def test_the_norm_adds_its_bias_and_rounds_before_gamma_in_bfloat16_only():
    x1, x2, gamma, beta = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64), torch.randn(64)
    y, _, x = norm(x1, x2, gamma, beta)
    assert torch.allclose(y, torch.nn.functional.rms_norm(x1 + x2, (64,), gamma, 1e-6) + beta, atol=1e-6)
    assert torch.equal(x, x1 + x2)
    low = [tensor.bfloat16() for tensor in (x1, x2, gamma)]
    with use(diagnostic_fp32=False):
        y, rstd, x = norm(*low)
    assert torch.equal(y, ((x.float() * rstd).bfloat16().float() * low[2].float()).bfloat16())
    with pytest.raises(ContractError, match="R70"):
        norm(x1, x2, gamma, beta[:32])


def test_the_routers_softmax_weights_sum_to_one_only_when_asked():
    logits = torch.randn(7, 32)
    weights, ids = gated(logits, 1)
    assert torch.allclose(weights, torch.softmax(logits.gather(1, ids.long()), -1), atol=1e-6)
    assert torch.allclose(gated(logits, 0)[0], torch.softmax(logits, -1).gather(1, ids.long()))
    with pytest.raises(ContractError, match="R58"):
        gated(logits, 2)


def test_the_experts_range_is_all_experts_by_default():
    x, ids = torch.randn(3, 8), torch.tensor([[1, 0], [3, 1], [2, 3]], dtype=torch.int32)
    options = {"active_num": 6, "expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    ours = OPS["_C_ascend::npu_moe_init_routing_custom"](x, ids, quant_mode=-1, **options)
    cann = OPS["npu::npu_moe_init_routing_v2"](x, ids, quant_mode=-1, active_expert_range=[0, 4], **options)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], cann[:3], strict=True))
    assert ours[2].tolist() == [1, 2, 1, 2]


def test_each_token_gets_the_slot_of_its_position_and_the_rest_none():
    slots = torch.full((10,), 99, dtype=torch.int32)
    tables = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    starts, positions = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([127, 128, 0, 1, 2])
    constants = {"TOTAL_CP_WORLD_SIZE": 1, "TOTAL_CP_RANK": 0, "CP_KV_CACHE_INTERLEAVE_SIZE": 1, "PAD_ID": -1}
    compute_slot_mapping((3,), 5, 8, starts, positions, tables, 2, 128, slots, BLOCK_SIZE=1024, **constants)
    assert slots.tolist() == [7 * 128 + 127, 3 * 128, 640, 641, 642, -1, -1, -1, 99, 99]


def test_static_quantisation_rounds_and_saturates():
    x = torch.tensor([[0.4, 2.6, 900.0, -900.0]])
    quantised = OPS["npu::npu_quantize"](x, torch.tensor([2.0]), None, torch.qint8, -1, False)
    assert quantised.tolist() == [[1, 5, 127, -128]]
    assert OPS["npu::npu_quantize"](x, torch.tensor([2.0]), None, torch.qint8, -1, True)[0, 1] == 1
