"""Activations, norms, rotary embeddings, cache writes and ATB attention against plain formulas."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.ops.rope import forget_process_state
from ascend_emulator.rules import ContractError

from emulator.tests.contracts import attention_case
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def new_process():
    forget_process_state()
    yield
    forget_process_state()


def swigluoai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).float()


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu_is_gpt_oss_activation(dim, interleaved):
    x = torch.randn(8, 12) * 6
    with use(cann="8.5"):
        got = OPS["npu::npu_clipped_swiglu"](x, dim=dim, interleaved=interleaved)
    moved = x.movedim(dim, -1)
    gate, up = (moved[..., ::2], moved[..., 1::2]) if interleaved else moved.chunk(2, -1)
    assert_close(got, swigluoai(gate, up).movedim(-1, dim), scale=4)


def test_clipped_swiglu_leaves_rows_past_the_groups():
    with use(cann="8.5"):
        out = OPS["npu::npu_clipped_swiglu"](torch.ones(5, 4), group_index=torch.tensor([1, 2]))
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()


def test_swiglu_is_on_halves_without_clamp():
    x = torch.randn(3, 16) * 20
    assert_close(OPS["npu::npu_swiglu"](x), torch.nn.functional.silu(x[:, :8]) * x[:, 8:])


def test_dynamic_quant_keeps_half_a_step():
    x = torch.randn(3, 40)
    out, scale = OPS["npu::npu_dynamic_quant"](x)
    assert out.dtype == torch.int8
    assert ((out * scale[:, None] - x).abs() <= scale[:, None] * 0.51).all()


def test_only_the_norm_with_a_sum_rounds_before_gamma():
    x1, x2, gamma = torch.randn(4, 32).bfloat16(), torch.randn(4, 32).bfloat16(), torch.randn(32).bfloat16()
    y, rstd, x = OPS["npu::npu_add_rms_norm"](x1, x2, gamma, 1e-5)
    assert torch.equal(x, x1 + x2)
    want = torch.nn.functional.rms_norm(x.float(), (32,), gamma.float(), 1e-5)
    assert_close(y, want)
    assert torch.equal(y, ((x.float() * rstd).bfloat16().float() * gamma.float()).bfloat16())
    again, again_rstd = OPS["npu::npu_rms_norm"](x, gamma.float(), 1e-5)
    assert torch.equal(again, (x.float() * rstd * gamma.float()).bfloat16())
    assert not torch.equal(again, y)
    assert torch.equal(again_rstd, rstd)
    assert rstd.shape == (4, 1)


def table(rows: int, dim: int) -> torch.Tensor:
    angle = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat([angle.cos(), angle.sin()], -1)


def turned(x: torch.Tensor, at: torch.Tensor, dim: int, neox: bool) -> torch.Tensor:
    """x [T, N, D] rotated as complex numbers."""
    cos, sin = table(64, dim)[at].chunk(2, -1)
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if neox else x.unflatten(-1, (-1, 2))
    z = torch.view_as_complex(pairs.float().contiguous()) * torch.complex(cos, sin)[:, None]
    out = torch.view_as_real(z)
    return (out.transpose(-1, -2) if neox else out).flatten(-2)


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embeddings_turn_pairs(neox):
    at = torch.tensor([0, 5, 63])
    query, key = torch.randn(3, 2, 32), torch.randn(3, 1, 32)
    want = turned(query, at, 32, neox), turned(key, at, 32, neox)
    got = query.flatten(1).clone(), key.flatten(1).clone()
    OPS["atb::_npu_rotary_embedding"](at, *got, 32, table(64, 32), neox)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w.flatten(1), scale=4)
    mode = "half" if neox else "interleave"
    cos, sin = (
        (torch.cat([t, t], -1) if neox else t.repeat_interleave(2, -1))[None, :, None]
        for t in table(64, 32)[at].chunk(2, -1)
    )
    assert_close(OPS["npu::npu_rotary_mul"](query[None], cos, sin, mode)[0], want[0], scale=4)


def test_apply_rotary_pos_emb_turns_in_place():
    at = torch.arange(3)
    query = torch.randn(1, 3, 2, 128)
    want = turned(query[0], at, 128, True)
    cos, sin = (torch.cat([t, t], -1)[None, :, None] for t in table(64, 128)[at].chunk(2, -1))
    got, _ = OPS["npu::npu_apply_rotary_pos_emb"](query, query.clone(), cos, sin)
    assert got is query
    assert_close(query[0], want, scale=4)


@pytest.mark.parametrize("nz", [False, True], ids=["ND", "FRACTAL_NZ"])
@pytest.mark.parametrize("name", ["atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache"])
def test_cache_writes_go_to_their_slots(name, nz):
    block, blocks, heads, dim = 4, 3, 2, 32
    key, value = torch.randn(3, heads, dim), torch.randn(3, heads, dim)
    size = (blocks, heads * dim // 16, block, 16) if nz else (blocks, block, heads, dim)
    caches = torch.zeros(size), torch.zeros(size)
    slots = torch.tensor([5, 0, 11], dtype=torch.int32)
    with use(format_of=lambda t: FORMAT_FRACTAL_NZ if nz else 2):
        OPS[name](key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        rows = cache.permute(0, 2, 1, 3).reshape(-1, heads, dim) if nz else cache.view(-1, heads, dim)
        assert torch.equal(rows[slots.long()], new)
        assert int((rows != 0).any(-1).any(-1).sum()) == 3


def test_negative_slots_are_skipped():
    caches = torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16)
    OPS["atb::_npu_reshape_and_cache"](torch.ones(2, 1, 16), torch.ones(2, 1, 16), *caches, torch.tensor([-1, 3]).int())
    assert caches[0].sum() == 16


def test_atb_attention_equals_the_fused_operator_without_sink_or_window():
    fia = OPS["npu::npu_fused_infer_attention_score_v2"]
    decode = attention_case([1, 1], [200, 7], sink=False)
    caches = [t.view(-1, 128, 2, 64) for t in (decode["key"], decode["value"])]
    out = torch.empty_like(decode["query"])
    lengths, table_ = torch.tensor([200, 7], dtype=torch.int32), decode["block_table"]
    OPS["atb::_npu_paged_attention"](decode["query"], *caches, 2, 8, 64**-0.5, table_, lengths, out)
    assert torch.equal(out, fia(**decode)[0])

    chunk = attention_case([40, 7], [200, 7], sink=False)
    caches = [t.view(-1, 128, 2, 64) for t in (chunk["key"], chunk["value"])]
    out, small = torch.empty_like(chunk["query"]), torch.ones(128, 128).triu(1)
    q_lens = torch.tensor([40, 7], dtype=torch.int32)
    OPS["atb::_npu_flash_attention_qlens"](
        chunk["query"], *caches, chunk["block_table"], small, q_lens, lengths, 2, 8, 64**-0.5, out
    )
    assert torch.equal(out, fia(**chunk)[0])

    prompt = attention_case([30, 7], [30, 7], sink=False)
    packed = [
        torch.cat([t[prompt["block_table"][r, 0], :n].view(n, 2, 64) for r, n in ((0, 30), (1, 7))])
        for t in (prompt["key"], prompt["value"])
    ]
    out, mask = torch.empty_like(prompt["query"]), torch.ones(30, 30).triu(1).bfloat16()
    OPS["atb::_npu_flash_attention"](
        prompt["query"], *packed, mask, torch.tensor([30, 7], dtype=torch.int32), 64**-0.5, 8, 2, out
    )
    assert torch.equal(out, fia(**prompt)[0])


def atb_operands() -> dict[str, dict[str, object]]:
    """A legal call of each of ATB's attention operators: two requests, 8 heads on 2."""
    case = attention_case([1, 1], [200, 7], sink=False)
    key_cache, value_cache = (t.view(-1, 128, 2, 64) for t in (case["key"], case["value"]))
    query, lengths = case["query"], torch.tensor([200, 7], dtype=torch.int32)
    heads = {"num_kv_heads": 2, "num_heads": 8, "scale_value": 0.125, "out": torch.zeros_like(query)}
    pages = {"key_cache": key_cache, "value_cache": value_cache, "block_table": case["block_table"]}
    packed = {"key": torch.randn(2, 2, 64).bfloat16(), "value": torch.randn(2, 2, 64).bfloat16()}
    ones = torch.ones(2, dtype=torch.int32)
    return {
        "_npu_paged_attention": {"query": query, **pages, **heads, "context_lens": lengths},
        "_npu_paged_attention_get_workspace": {"query": query, **pages, **heads, "context_lens": lengths},
        "_npu_flash_attention": {"query": query, **packed, **heads, "mask": torch.zeros(1, 1), "seq_len": ones},
        "_npu_flash_attention_qlens": {
            "query": query, **pages, **heads, "mask": torch.zeros(128, 128), "seq_len": ones, "context_lens": lengths,
        },
    }  # fmt: skip


def broken_for_atb(name: str, legal: dict[str, object]) -> dict[str, tuple[dict[str, object], str]]:
    """Calls that the operator must refuse: name -> changed arguments, and words of the refusal."""
    wide = legal["out"].new_zeros(2, 8, 128)
    found = {
        "out strided": ({"out": wide[..., :64]}, "at_tensor is not contiguous"),
        "out larger": ({"out": wide}, "out should be like query"),
        "out float32": ({"out": legal["out"].float()}, "out should be like query"),
        "heads": ({"num_heads": 9}, "9 heads are no multiple of 2"),
        "no heads": ({"num_heads": 0}, "0 heads"),
        "negative key heads": ({"num_kv_heads": -1}, "no multiple of -1"),
        "no key heads": ({"num_kv_heads": 0}, "no multiple of 0"),
    }
    if "key_cache" in legal:
        cache, table = legal["key_cache"], legal["block_table"]
        found |= {
            "cache rank": ({"value_cache": cache.flatten(2)}, "value_cache should be contiguous"),
            "cache strided": ({"key_cache": cache.transpose(1, 2)}, "key_cache should be contiguous"),
            "table": ({"block_table": table.long()}, "block_table should be int32"),
            "lengths": ({"context_lens": legal["context_lens"].long()}, "context_lens should be int32"),
        }
        if "workspace" not in name:
            long = torch.tensor([128 * table.size(1) + 1, 7], dtype=torch.int32)
            found |= {
                "table short": ({"context_lens": long}, "needs more blocks than"),
                "wild block": ({"block_table": table + 100}, r"\[R33\]"),
            }
    if name == "_npu_flash_attention":
        found |= {
            "mask rank": ({"mask": torch.zeros(1)}, "mask should have two dimensions"),
            "mask short": ({"seq_len": torch.tensor([2], dtype=torch.int32)}, "should fit mask"),
            "rows short": ({"seq_len": torch.ones(3, dtype=torch.int32)}, "should fit mask"),
        }
    return found


@pytest.mark.parametrize("name", atb_operands())
def test_atb_attention_refuses(name):
    legal, op = atb_operands()[name], OPS[f"atb::{name}"]
    op(**legal)
    if "context_lens" in legal:
        op(**{**legal, "context_lens": torch.tensor([128 * legal["block_table"].size(1), 128], dtype=torch.int32)})
    for change, words in broken_for_atb(name, legal).values():
        broken = {**legal, **change}
        with pytest.raises(ContractError, match=words):
            op(**broken)


def test_top_k_top_p_keeps_the_smallest_set():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.26, 0.24]]).log()
    op = OPS["npu::npu_top_k_top_p"]
    kept = torch.isfinite(op(logits, torch.tensor([0.7, 1.0]), torch.tensor([4, 2], dtype=torch.int32)))
    assert kept[0].tolist() == [True, True, False, False]
    assert kept[1].tolist() == [True, True, True, False]  # two of the largest three are equal


def test_small_operators():
    x = torch.randn(3, 8)
    assert torch.equal(OPS["npu::npu_dtype_cast"](x, torch.bfloat16), x.bfloat16())
    assert torch.equal(OPS["npu::_npu_dtype_cast"](x, torch.float16), x.half())
    assert OPS["npu::npu_prefetch"](x, None, 1) is None
