"""Routing, dispatch and combine against plain formulas."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.ops import OPS

from tests.tolerances import assert_close

init_v2 = OPS["npu::npu_moe_init_routing_v2"]
unpermute = OPS["npu::npu_moe_token_unpermute"]

TOKENS, CHOICES, EXPERTS, HIDDEN = 9, 3, 6, 32


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(TOKENS)]).to(torch.int32)
    return x, ids, torch.rand(TOKENS, CHOICES, generator=generator)


def dispatch(x: torch.Tensor, ids: torch.Tensor, span: tuple[int, int] = (0, EXPERTS), **extra: int):
    return init_v2(
        x, ids, active_num=ids.numel(), expert_num=EXPERTS, expert_tokens_num_type=extra.pop("num_type", 1),
        expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=list(span), **extra,
    )  # fmt: skip


def expert_of_row(rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """A different function per expert: row * (expert + 1)."""
    return rows.float() * (expert[:, None] + 1)


@pytest.mark.parametrize("span", [(0, EXPERTS), (2, 5)], ids=["all experts", "some of them"])
def test_dispatch_and_combine_are_a_weighted_sum_over_experts(span):
    x, ids, weights = routed()
    rows, places, counts, _ = dispatch(x, ids, span)
    served = ((ids >= span[0]) & (ids < span[1])).long()
    active = int(served.sum())
    assert counts.dtype == torch.int64
    assert counts.tolist() == [int((ids == e).sum()) for e in range(*span)]
    assert rows[active:].isnan().all()
    expert = torch.repeat_interleave(torch.arange(*span), counts)
    computed = torch.zeros(TOKENS * CHOICES, HIDDEN)
    computed[:active] = expert_of_row(rows[:active], expert)
    out = unpermute(computed, places.abs(), weights * served)
    want = (x.float()[:, None] * (weights * served * (ids + 1))[..., None]).sum(1)
    assert_close(out, want)


def test_the_sort_is_stable_and_both_row_maps_agree():
    x, ids, _ = routed(1)
    _, gather, _, _ = dispatch(x, ids, (1, 4))
    _, scatter, _, _ = dispatch(x, ids, (1, 4), row_idx_type=1)
    flat = ids.flatten()
    order = [p for e in range(1, 4) for p in range(flat.numel()) if flat[p] == e]
    assert scatter[: len(order)].tolist() == order
    want = torch.full((flat.numel(),), -1, dtype=torch.int32)
    want[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(gather, want)


def test_key_value_counts_name_the_experts_that_have_rows():
    x, _, _ = routed()
    ids = torch.tensor([[4, 1]] * TOKENS, dtype=torch.int32)
    _, _, counts, _ = dispatch(x, ids, num_type=2)
    assert counts[:2].tolist() == [[1, TOKENS], [4, TOKENS]]
    assert (counts[2:] == 0).all()


def test_a_poisoned_row_reaches_its_token_even_with_weight_zero():
    rows = torch.ones(4, 8)
    rows[3] = float("nan")
    out = unpermute(rows, torch.tensor([0, 3, 1, 2], dtype=torch.int32), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.full((8,), 2.0))


def test_permute_sorts_rows_by_index():
    x, ids, weights = routed(2)
    permuted, places = OPS["npu::npu_moe_token_permute"](x, ids)
    order = sorted(range(ids.numel()), key=lambda p: (int(ids.flatten()[p]), p))
    assert torch.equal(permuted, x[[p // CHOICES for p in order]])
    assert_close(unpermute(permuted, places, weights), (x.float() * weights.sum(1, keepdim=True)))
    kept, _ = OPS["npu::npu_moe_token_permute"](x, ids, num_out_tokens=5)
    assert torch.equal(kept, permuted[:5])


def test_top_k_softmax_is_over_all_experts_and_numbers_rows_by_column():
    logits = torch.randn(4, 8)
    weights, ids, rows = OPS["npu::npu_moe_gating_top_k_softmax"](logits, k=3)
    want = logits.softmax(-1).sort(-1, descending=True)
    assert torch.equal(ids, want.indices[:, :3].to(torch.int32))
    assert_close(weights, want.values[:, :3])
    assert rows.tolist() == [[i, 4 + i, 8 + i] for i in range(4)]
    chosen = torch.gather(logits, 1, ids.long()).softmax(-1)
    assert_close(weights / weights.sum(-1, keepdim=True), chosen, scale=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_version_2_takes_the_softmax_before_or_behind_the_choice(dtype):
    x = torch.randn(4, 8).to(dtype)
    x[2] = 1  # ties go to the first
    op, want = OPS["npu::npu_moe_gating_top_k_softmax_v2"], x.float().sort(dim=-1, descending=True, stable=True)
    weights, ids, nothing = op(x, k=3, renorm=1, output_softmax=True)
    assert torch.equal(ids, want.indices[:, :3].to(torch.int32))
    assert torch.equal(weights, want.values[:, :3].softmax(-1).to(dtype))
    assert nothing.numel() == 0
    finished = torch.tensor([False, True, False, False])
    weights, ids, whole = op(x, k=3, output_softmax=True, finished=finished)
    assert torch.equal(whole, x.float().softmax(-1))
    assert torch.equal(weights, whole.sort(dim=-1, descending=True, stable=True).values[:, :3].to(dtype))
    assert (ids == 8).all(1).tolist() == finished.tolist()


def test_a_selection_bias_chooses_but_does_not_weigh():
    logits, bias = torch.randn(4, 8), torch.zeros(8)
    bias[5] = 10
    weights, ids, norm = OPS["npu::npu_moe_gating_top_k"](logits, 2, bias=bias, norm_type=1, out_flag=True)
    assert (ids[:, 0] == 5).all()
    picked = torch.sigmoid(logits).gather(1, ids.long())
    assert_close(weights, picked / picked.sum(-1, keepdim=True))
    assert_close(norm, torch.sigmoid(logits))
