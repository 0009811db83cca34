"""The attention kernel against torch's own scaled_dot_product_attention with the sink as an explicit extra key."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from ascend_emulator.context import use
from ascend_emulator.ops import OPS
from ascend_emulator.ops.fia_mask import Tiling, band, read_as_hardware_does
from torch.nn.functional import scaled_dot_product_attention

from emulator.tests.contracts import TRIANGLE, attention_case, leaves_undefined
from tests.tolerances import assert_close

fia = OPS["npu::npu_fused_infer_attention_score_v2"]
fia_out = OPS["npu::npu_fused_infer_attention_score_v2.out"]
fia_v1 = OPS["npu::npu_fused_infer_attention_score"]

# probabilities are rounded to bfloat16 (2^-9 each) before they meet values of order one
ROUNDED_P = 3e-3


def gathered(case: dict, name: str, request: int) -> torch.Tensor:
    """[kv_len, kv_heads, dim] of one request, row by row through the block table."""
    cache, block = case[name], case["block_size"]
    dim = cache.size(2) // case["num_key_value_heads"]
    rows = [
        cache[case["block_table"][request, i // block], i % block] for i in range(case["actual_seq_kvlen"][request])
    ]
    return torch.stack(rows).view(len(rows), -1, dim)


def expected(case: dict, keys_seen: int | None) -> torch.Tensor:
    """torch's attention in float32, with the sink as a key: its score is the sink, its value zero."""
    heads, group = case["num_query_heads"], case["num_query_heads"] // case["num_key_value_heads"]
    dim, scale, sink = case["query"].size(2), case["softmax_scale"], case["learnable_sink"]
    rows = []
    for request, (start, end) in enumerate(pairwise([0, *case["actual_seq_qlen"]])):
        if start == end:
            continue
        query = case["query"][start:end].float().transpose(0, 1)
        key, value = (
            gathered(case, name, request).float().repeat_interleave(group, 1).transpose(0, 1)
            for name in ("key", "value")
        )
        kv_len = key.size(1)
        position = torch.arange(kv_len - (end - start), kv_len)[:, None]
        distance = position - torch.arange(kv_len)
        seen = (distance >= 0) & (distance < (keys_seen or kv_len + 1))
        # one more key: its score is put together by an additive mask, its key and value are zero
        key = torch.cat([key, key.new_zeros(heads, 1, dim)], 1)
        value = torch.cat([value, value.new_zeros(heads, 1, dim)], 1)
        bias = torch.zeros(heads, end - start, kv_len + 1).masked_fill(
            ~torch.cat([seen, seen.new_ones(end - start, 1)], 1), float("-inf")
        )
        bias[..., -1] = float("-inf") if sink is None else sink.float()[:, None]
        rows.append(scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale).transpose(0, 1))
    return torch.cat(rows)


MIXTURES = {
    "one token": ([1], [1]),
    "prefill": ([37], [37]),
    "chunk behind a cached prefix": ([65], [260]),
    "decode": ([1, 1, 1], [300, 1, 129]),
    "decode, chunk and prefill in one batch": ([1, 70, 33], [200, 190, 33]),
    "empty request between": ([5, 0, 1], [140, 7, 128]),
}


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("name", MIXTURES)
def test_sinks_windows_and_pages_match_torchs_attention(name, window):
    q_lens, kv_lens = MIXTURES[name]
    case = attention_case(q_lens, kv_lens, window=window)
    out, lse = fia(**case)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (0,)
    assert_close(out, expected(case, 128 if window else None), atol=ROUNDED_P)


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
def test_diagnostic_float32_is_exact(window):
    case = attention_case([1, 70, 33], [200, 190, 33], window=window, dtype=torch.float32)
    with use(diagnostic_fp32=True):
        out, _ = fia(**case)
    assert_close(out, expected(case, 128 if window else None), scale=4)  # sums of 200 products in another order


@pytest.mark.parametrize("window", [False, True], ids=["full", "window"])
def test_a_chunk_of_more_than_1024_tokens_matches(window):
    case = attention_case([1100], [1164], window=window, heads=2, kv_heads=1, dtype=torch.float32)
    with use(diagnostic_fp32=True):
        out, _ = fia(**case)
    assert_close(out, expected(case, 128 if window else None), scale=8)  # sums of up to 1164 products


def test_without_a_sink_it_is_plain_attention():
    case = attention_case([9], [140], sink=False)
    assert_close(fia(**case)[0], expected(case, None), atol=ROUNDED_P)


def test_the_sink_is_not_scaled_and_changes_the_output():
    case = attention_case([4], [4])
    strong = dict(case, learnable_sink=torch.full((8,), 30.0, dtype=torch.bfloat16))
    weak = dict(case, learnable_sink=torch.full((8,), -30.0, dtype=torch.bfloat16))
    assert fia(**strong)[0].abs().max() < 1e-6
    assert_close(fia(**weak)[0], expected(dict(case, learnable_sink=None), None), atol=ROUNDED_P)


def test_a_sink_far_above_the_scores_gives_zero():
    case = attention_case([2], [2])
    case["learnable_sink"] = torch.full((8,), 1e4, dtype=torch.bfloat16)
    assert torch.equal(fia(**case)[0], torch.zeros(2, 8, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (200, 300), (300, 300)], ids=["decode", "chunk", "prefill"])
@pytest.mark.parametrize(("pre_tokens", "farthest"), [(127, 127), (128, 128)])
def test_a_band_keeps_pre_tokens_plus_one_keys(q_len, kv_len, pre_tokens, farthest):
    case = attention_case([q_len], [kv_len], window=True, sink=False)
    case["pre_tokens"] = pre_tokens
    plain = fia(**case)[0][-1]
    for distance, seen in ((farthest, True), (farthest + 1, False)):
        planted = dict(case, value=case["value"].clone())
        at = kv_len - 1 - distance
        planted["value"][case["block_table"][0, at // 128], at % 128] += 50
        assert torch.equal(fia(**planted)[0][-1], plain) is not seen


def test_next_tokens_and_rows_that_see_nothing():
    case = attention_case([6], [4], window=True)  # two rows stand before the first key
    out, lse = fia(**case, return_softmax_lse=True)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.isposinf(lse[:2]).all()
    assert torch.isfinite(lse[2:]).all()


def test_requests_without_keys_give_zero_and_an_infinite_log_sum_exp():
    case = attention_case([3, 2], [4, 4], window=True)
    case["actual_seq_kvlen"] = [0, 4]
    out, lse = fia(**case, return_softmax_lse=True)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert torch.isposinf(lse[:3]).all()


@pytest.mark.parametrize(("cann", "with_sink"), [("8.3.rc1", False), ("8.3.rc2", False), ("8.5", True)])
def test_log_sum_exp_includes_the_sink_from_8_5_only(cann, with_sink):
    case = attention_case([5], [5], dtype=torch.float32)
    with use(cann=cann, diagnostic_fp32=True):
        _, lse = fia(**case, return_softmax_lse=True)
    key = gathered(case, "key", 0).repeat_interleave(4, 1)
    scores = torch.einsum("qhd,khd->qhk", case["query"], key) * case["softmax_scale"]
    scores = scores.masked_fill(torch.arange(5)[None, None] > torch.arange(5)[:, None, None], float("-inf"))
    if with_sink:
        scores = torch.cat([scores, case["learnable_sink"].expand(5, 8)[..., None]], -1)
    assert lse.shape == (5, 8, 1)
    assert_close(lse[..., 0], torch.logsumexp(scores, -1), scale=4)


def test_probabilities_are_rounded_before_they_meet_the_values():
    case = attention_case([1], [64], heads=1, kv_heads=1, sink=False)
    key, value = (gathered(case, n, 0)[:, 0].float() for n in ("key", "value"))
    scores = key @ case["query"][0, 0].float() * case["softmax_scale"]
    p = torch.exp(scores - scores.max())
    rounded = (p.bfloat16().float() @ value / p.sum()).bfloat16()
    assert torch.equal(fia(**case)[0][0, 0], rounded)


def test_every_cache_rank_gives_the_same():
    case = attention_case([1, 40], [200, 150])
    blocks = [t.view(t.size(0), 128, 2, 64) for t in (case["key"], case["value"])]
    four = [t.transpose(1, 2).contiguous() for t in blocks]
    five = [t.view(t.size(0), 128, 2, 4, 16).permute(0, 2, 3, 1, 4).contiguous() for t in blocks]
    want = fia(**case)[0]
    for key, value in (four, five):
        assert torch.equal(fia(**dict(case, key=key, value=value))[0], want)


def test_unpaged_keys_are_packed_with_cumulative_lengths():
    case = attention_case([1, 40], [200, 150], window=True)
    want = fia(**case)[0]
    unpaged = dict(case, block_table=None, block_size=0, actual_seq_kvlen=[200, 350])
    for name in ("key", "value"):
        unpaged[name] = torch.cat([gathered(case, name, r) for r in (0, 1)])
    assert torch.equal(fia(**unpaged)[0], want)
    packed = {name: unpaged[name].transpose(0, 1).contiguous() for name in ("query", "key", "value")}
    assert torch.equal(fia(**{**unpaged, **packed, "input_layout": "NTD_TND"})[0], want)


def test_out_writes_the_callers_tensors_with_any_large_workspace():
    case = attention_case([1, 1], [200, 150])
    want, want_lse = fia(**case, return_softmax_lse=True)
    out, lse = torch.empty_like(want), torch.empty_like(want_lse)
    with use(tnd_max_workspace=True):
        workspace = OPS["npu::_npu_fused_infer_attention_score_v2_get_max_workspace"](**case)
    assert workspace.dtype == torch.bfloat16
    got = fia_out(**case, return_softmax_lse=True, workspace=workspace, out=[out, lse])
    assert got[0] is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    fia_out(**case, out=[out.zero_(), torch.empty(1)])
    assert torch.equal(out, want)


def test_without_execution_shapes_are_known_and_nothing_is_read():
    case = attention_case([1, 40], [200, 150])
    for name in ("query", "key", "value", "atten_mask", "block_table", "learnable_sink"):
        case[name] = case[name].to("meta")
    with use(execute=False, capturing=True):
        out, lse = fia(**case, return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((41, 8, 64), (41, 8, 1))


def test_tiles_of_a_plain_triangle_are_the_band():
    lengths = [(1, 1), (1, 700), (3, 5), (130, 130), (600, 600), (1100, 1100), (513, 1541), (40, 1030)]
    for q_len, kv_len in lengths:
        for mode, pre, next_ in ((3, 0, 0), (4, 127, 0), (4, 0, 3), (4, 600, 0)):
            for longest in (kv_len, 1600):
                got = read_as_hardware_does(
                    TRIANGLE, q_len, kv_len, mode, pre, next_, Tiling.of([q_len], [longest], 8, False)
                )
                want = band(q_len, kv_len, pre if mode == 4 else kv_len, next_)
                assert torch.equal(got, want), (q_len, kv_len, mode, pre, next_, longest)


def test_a_mask_cut_at_the_window_is_wrong_in_long_chunks_only():
    """The cut mask of vllm-ascend 0.15 to 0.18: exact to 700 tokens; at 1100 rows see keys far outside the window."""
    cut = TRIANGLE | torch.ones(2048, 2048, dtype=torch.int8).tril_(-128)
    for length, wrong in ((100, 0), (512, 0), (700, 0), (1100, 41024)):
        tiling = Tiling.of([length], [length], 8, False)
        got = read_as_hardware_does(cut, length, length, 4, 128, 0, tiling)
        assert int((got != band(length, length, 127, 0)).sum()) == wrong
    case = attention_case([1100], [1100], window=True, heads=1, kv_heads=1)
    case.update(atten_mask=cut, pre_tokens=128)
    with use(strict=False), leaves_undefined(24):
        out, _ = fia(**case)
    want = expected(case, 128)
    error = (out.float() - want).abs().amax((1, 2))
    assert error[:512].max() < 0.02
    assert error[770:].max() > 0.05


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_batched_layouts_match_the_packed_one(layout):
    case = attention_case([7, 7], [7, 7], heads=4, kv_heads=2, sink=False)
    want = fia(**case)[0].view(2, 7, 4, 64)
    tensors = {"query": case["query"].view(2, 7, 4, 64)}
    for name in ("key", "value"):
        tensors[name] = torch.stack([gathered(case, name, r) for r in (0, 1)])
    if layout == "BSH":
        tensors = {name: t.flatten(2) for name, t in tensors.items()}
    if layout == "BNSD":
        tensors = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
    got, _ = fia_v1(
        **tensors,
        atten_mask=TRIANGLE,
        num_heads=4,
        num_key_value_heads=2,
        scale=64**-0.5,
        input_layout=layout,
        sparse_mode=3,
    )
    got = got.view(2, 7, 4, 64) if layout == "BSH" else got.transpose(1, 2) if layout == "BNSD" else got
    assert torch.equal(got, want)


@pytest.mark.parametrize(("pre_tokens", "keys"), [(128, 128), (2147483647, 300)])
def test_decode_in_bsh_counts_keys_in_pre_tokens(pre_tokens, keys):
    """vllm-ascend's own window decode: pre_tokens is a number of keys there, unlike in TND."""
    case = attention_case([1], [300], sink=False)
    got, _ = fia_v1(
        case["query"].view(1, 1, -1), case["key"], case["value"], actual_seq_lengths=[1], actual_seq_lengths_kv=[300],
        block_table=case["block_table"], num_heads=8, num_key_value_heads=2, scale=64**-0.5, pre_tokens=pre_tokens,
        input_layout="BSH", block_size=128,
    )  # fmt: skip
    assert_close(got.view(1, 8, 64), expected(case, keys), atol=ROUNDED_P)
