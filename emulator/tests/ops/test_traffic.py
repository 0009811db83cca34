"""Traffic counts the bytes that a call touches, not whole buffers."""

from __future__ import annotations

import torch
from ascend_emulator.ops import OPS

from emulator.tests.contracts import attention_case


def test_attention_reads_the_keys_in_reach_and_not_the_cache():
    fia = OPS["npu::npu_fused_infer_attention_score_v2"]
    row, key = 8 * 64 * 2, 2 * 2 * 64 * 2  # bytes of a query row, and of a key with its value
    for window, keys in ((False, 1000), (True, 128)):
        read, written, launches = fia.traffic(**attention_case([1], [1000], window=window))
        assert launches == 1
        assert written == row
        assert abs(read - (row + keys * key)) < 1200  # mask, block table and sink
    read, _, _ = fia.traffic(**attention_case([100], [1000], window=True))
    assert abs(read - (100 * row + 227 * key)) < 101_000


def test_a_grouped_matmul_reads_the_experts_that_have_rows():
    x, weight = torch.zeros(7, 64).bfloat16(), torch.zeros(8, 64, 32).bfloat16()
    bias = torch.zeros(8, 32)
    counts = torch.tensor([0, 3, 0, 0, 2, 0, 0, 0])
    for groups, kind in ((counts, 1), (counts.cumsum(0), 0)):
        read, written, _ = OPS["npu::npu_grouped_matmul"].traffic(
            [x], [weight], bias=[bias], group_list=groups, group_list_type=kind, group_type=0, split_item=2
        )
        assert read == 5 * 64 * 2 + 2 * (64 * 32 * 2 + 32 * 4) + 8 * 8
        assert written == 5 * 32 * 2


def test_a_cache_write_touches_its_slots():
    new, cache = torch.zeros(3, 2, 16).bfloat16(), torch.zeros(50, 4, 2, 16).bfloat16()
    slots = torch.tensor([1, -1, 7], dtype=torch.int32)
    assert OPS["atb::_npu_reshape_and_cache"].traffic(new, new, cache, cache, slots) == (2 * 2 * 64 + 12, 2 * 2 * 64, 1)
    assert OPS["npu::npu_scatter_pa_kv_cache"].traffic(new, new, cache, cache, slots.long()) == (6 * 64 + 24, 6 * 64, 1)


def test_the_rotary_operator_of_atb_is_two_look_ups_and_a_kernel():
    query, key = torch.zeros(3, 128).bfloat16(), torch.zeros(3, 64).bfloat16()
    at, table = torch.arange(3), torch.zeros(1000, 64).bfloat16()
    moved = OPS["atb::_npu_rotary_embedding"].traffic(at, query, key, 64, table, True)
    turned, row, positions = 3 * 192 * 2, 64 * 2, 3 * 8
    assert moved == (2 * (positions + 3 * row) + turned + 2 * 3 * row, 2 * 3 * row + turned, 3)


def test_dispatch_writes_served_rows():
    x, ids = torch.zeros(4, 32).bfloat16(), torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2]], dtype=torch.int32)
    read, written, _ = OPS["npu::npu_moe_init_routing_v2"].traffic(x, ids, expert_num=4, active_expert_range=[0, 2])
    assert (read, written) == (4 * 64 + 32, 4 * 64 + 32 + 16)


def test_paged_attention_reads_context_lens():
    query, cache = torch.zeros(2, 8, 64).bfloat16(), torch.zeros(9, 128, 2, 64).bfloat16()
    lengths, table = torch.tensor([130, 1], dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    read, written, _ = OPS["atb::_npu_paged_attention"].traffic(query, cache, cache, 2, 8, 1.0, table, lengths, query)
    assert (read, written) == (2048 + 131 * 512 + 12, 2048)
