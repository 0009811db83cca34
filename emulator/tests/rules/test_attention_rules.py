"""R01 to R40, R92 and R93: a legal call like gpt-oss's, broken in one point."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import CANN_VERSIONS, current, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import ContractError, NotEmulatedError

from emulator.tests.contracts import TRIANGLE, attention_case, leaves_undefined, notes, rejects

fia = OPS["npu::npu_fused_infer_attention_score_v2"]
fia_out = OPS["npu::npu_fused_infer_attention_score_v2.out"]
max_workspace = OPS["npu::_npu_fused_infer_attention_score_v2_get_max_workspace"]
fia_v1 = OPS["npu::npu_fused_infer_attention_score"]


def case(**changes: object) -> dict:
    """Two requests: a chunk of 4 tokens behind 136 cached ones, and a decode at 7."""
    return dict(attention_case([4, 1], [140, 7]), **changes)


def unpaged(**changes: object) -> dict:
    paged = case()
    return dict(
        paged, key=torch.randn(147, 2, 64).bfloat16(), value=torch.randn(147, 2, 64).bfloat16(), block_table=None,
        block_size=0, actual_seq_kvlen=[140, 147], **changes,
    )  # fmt: skip


def bsh(**changes: object) -> dict:
    paged = case()
    return dict(
        paged, query=torch.randn(2, 1, 512).bfloat16(), input_layout="BSH", sparse_mode=0, atten_mask=None,
        actual_seq_qlen=[1, 1], learnable_sink=None, **changes,
    )  # fmt: skip


def sized(dim: int, *, heads: int = 8, kv_heads: int = 2, **changes: object) -> dict:
    return dict(attention_case([4, 1], [140, 7], dim=dim, heads=heads, kv_heads=kv_heads), **changes)


@pytest.mark.parametrize("cann", CANN_VERSIONS)
@pytest.mark.parametrize("make", [case, unpaged, bsh])
def test_the_base_calls_are_legal(make, cann):
    with use(cann=cann, findings=[]) as context:
        fia(**make())
        fia(**make(), return_softmax_lse=True)
    assert not context.findings


def test_R01_sink_needs_packed_tokens():
    with rejects(1, "TND", "BSH"):
        fia(**{**bsh(), "learnable_sink": torch.zeros(8, dtype=torch.bfloat16)})


def test_R02_version_1_has_no_sink():
    names = {"actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
             "num_query_heads": "num_heads", "softmax_scale": "scale"}  # fmt: skip
    with rejects(2, "learnable_sink"):
        fia_v1(**{names.get(name, name): value for name, value in case().items()})


@pytest.mark.parametrize("shape", [(1, 8), (7,)])
def test_R03_sink_has_one_value_per_query_head(shape):
    with rejects(3, "(2)" if len(shape) == 2 else "(7)"):
        fia(**case(learnable_sink=torch.zeros(shape, dtype=torch.bfloat16)))


def test_R04_sink_is_bfloat16():
    with rejects(4, "bfloat16", "float32"):
        fia(**case(learnable_sink=torch.zeros(8)))
    with use(diagnostic_fp32=True):
        fia(**case(learnable_sink=torch.zeros(8)))


def test_R05_sink_needs_head_size_64_or_128():
    broken = sized(192, heads=2, kv_heads=2, sparse_mode=3)
    with rejects(5, "64/128", "192"):
        fia(**broken)
    with use(cann="8.5"), rejects(5):
        fia(**broken)


def test_R06_float32_is_for_diagnosis_only():
    broken = attention_case([4, 1], [140, 7], dtype=torch.float32, sink=False)
    for cann in ("8.3.rc2", "8.5"):
        with use(cann=cann), rejects(6, "float32"):
            fia(**broken)


def test_R06_packed_tokens_are_bfloat16():
    half = attention_case([4, 1], [140, 7], dtype=torch.float16)
    half["learnable_sink"] = case()["learnable_sink"]
    with rejects(6, "bf16", "float16"):
        fia(**half)
    with use(cann="8.5"):
        fia(**half)
        with rejects(6, "float16/bfloat16"):
            fia(**dict(half, key=half["key"].bfloat16()))


@pytest.mark.parametrize(
    "broken", [sized(96, sparse_mode=3), sized(192, learnable_sink=None)], ids=["96", "grouped 192"]
)
def test_R07_head_sizes_are_64_128_or_192(broken):
    with rejects(7, str(broken["query"].size(2))):
        fia(**broken)


def test_head_size_192_meets_values_of_128():
    wide = sized(192, heads=2, kv_heads=2, learnable_sink=None)
    out, _ = fia(**dict(wide, value=wide["value"][..., : 2 * 128].contiguous()))
    assert out.shape == (5, 2, 128)


def test_R08_ranks_of_packed_tokens():
    with rejects(8, "[5, 512]"):
        fia(**case(query=torch.zeros(5, 512, dtype=torch.bfloat16)))
    with rejects(8, "[1, 147, 2, 64]"):
        plain = unpaged()
        fia(**dict(plain, key=plain["key"][None], value=plain["value"][None]))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_query_heads": 4, "learnable_sink": None},
        {"num_query_heads": 8, "num_key_value_heads": 3},
        {"num_query_heads": 8, "num_key_value_heads": -2},
    ],
    ids=["not the query's", "no whole ratio", "negative"],
)
def test_R09_heads_agree(changes):
    with rejects(9):
        fia(**case(**changes))


def test_R09_heads_of_unpaged_keys_agree_and_share_at_most_64_ways():
    with rejects(9, "keyN(2)"):
        fia(**unpaged(num_key_value_heads=4))
    with rejects(9, "at most 64"):
        fia(**attention_case([1], [3], heads=65, kv_heads=1))
    fia(**attention_case([1], [3], heads=64, kv_heads=1))


def test_R10_key_value_heads_left_at_zero_divide_by_zero():
    with rejects(10, "num_key_value_heads is 0", "division by zero"):
        fia(**case(num_key_value_heads=0))


@pytest.mark.parametrize("name", ["actual_seq_qlen", "actual_seq_kvlen"])
@pytest.mark.parametrize("value", [None, []])
def test_R11_packed_tokens_need_lengths(name, value):
    with rejects(11):
        fia(**case(**{name: value}))


def test_R12_device_lengths_refuse_under_capture_and_are_noted_in_eager():
    on_device = case(actual_seq_qlen=torch.tensor([4, 5]))
    with use(capturing=True), rejects(12, "107027"):
        fia(**on_device)
    with use(findings=[]) as context:
        fia(**on_device)
    assert [f.rule for f in context.findings] == [12]
    with use(capturing=True, is_device=lambda t: t.dtype != torch.int64):
        fia(**on_device)  # a host tensor is as good as a list


def test_R13_length_lists_match():
    with rejects(13, "(2)", "(3)"):
        fia(**case(actual_seq_kvlen=[140, 7, 1]))
    with rejects(13, "4097", "4096"):
        fia(**case(actual_seq_qlen=[5] * 4097))
    with rejects(13, "4097", "4096"):
        fia(**case(actual_seq_kvlen=[1] * 4097))


def test_4096_requests_fit_into_a_call():
    query = torch.empty(4096, 8, 64, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(4096, 128, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(4096, 1, dtype=torch.int32, device="meta")
    lengths = {"actual_seq_qlen": list(range(1, 4097)), "actual_seq_kvlen": [128] * 4096}
    with use(execute=False):
        fia(**case(query=query, key=cache, value=cache, block_table=table, **lengths))


@pytest.mark.parametrize("lengths", [[-1, 5], [6, 5]], ids=["negative", "decreasing"])
def test_R14_cumulative_lengths_do_not_decrease(lengths):
    with rejects(14):
        fia(**case(actual_seq_qlen=lengths))


def test_R14_key_lengths_are_not_negative():
    with rejects(14, "actualSequenceLengthKV[1]=-1"):
        fia(**case(actual_seq_kvlen=[140, -1]))


def test_requests_without_rows_are_legal():
    fia(**case(actual_seq_qlen=[0, 5]))
    fia(**{**unpaged(), "actual_seq_qlen": [5, 5], "actual_seq_kvlen": [147, 147]})


@pytest.mark.parametrize("lengths", [[4, 4], [4, 6]], ids=["one short", "one long"])
def test_R15_last_query_length_must_equal_rows(lengths):
    with rejects(15, "561002", "queryT(5)", f"({lengths[-1]})"):
        fia(**case(actual_seq_qlen=lengths))


@pytest.mark.parametrize("lengths", [[150, 147], [140, 146]], ids=["decreasing", "not all keys"])
def test_R16_unpaged_key_lengths_are_cumulative(lengths):
    with rejects(16):
        fia(**{**unpaged(), "actual_seq_kvlen": lengths})


def test_R17_paged_key_lengths_are_per_request():
    with rejects(17, "per request", "[2, 3]"):
        fia(**case(actual_seq_kvlen=[140, 128 * 3 + 1]))


def test_a_table_and_a_cache_without_a_block_to_spare_are_enough():
    fia(**attention_case([4, 1], [140, 7], spare=0))


def test_R18_at_most_a_million_tokens():
    tokens = (1 << 20) + 1
    with use(execute=False), rejects(18, "1048577"):
        fia(**case(query=torch.empty(tokens, 8, 64, dtype=torch.bfloat16, device="meta"), actual_seq_qlen=[1, tokens]))
    query = torch.empty(1 << 20, 8, 64, dtype=torch.bfloat16, device="meta")
    with use(execute=False):
        fia(**case(query=query, actual_seq_qlen=[1, 1 << 20], sparse_mode=0, atten_mask=None))


@pytest.mark.parametrize("mode", [1, 2, 5])
def test_R19_sparse_modes_of_packed_tokens(mode):
    with rejects(19, f"sparseMode = {mode}"):
        fia(**case(sparse_mode=mode))


def test_R20_mode_0_takes_no_mask():
    with rejects(20, "[2048, 2048]"):
        fia(**case(sparse_mode=0))


@pytest.mark.parametrize("mode", [3, 4])
@pytest.mark.parametrize("mask", [None, torch.zeros(0, dtype=torch.int8)])
def test_R21_causal_and_band_need_a_mask(mode, mask):
    with rejects(21):
        fia(**case(sparse_mode=mode, atten_mask=mask))


@pytest.mark.parametrize("shape", [(2048, 2047), (2, 2048, 2048), (140, 140)])
def test_R22_compressed_mask_is_2048_square(shape):
    with use(execute=False), rejects(22, "(2048, 2048)", str(shape[-1])):
        fia(**case(atten_mask=torch.zeros(shape, dtype=torch.int8, device="meta")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_R23_compressed_mask_is_boolean(dtype):
    with rejects(23, "bool, int8 or uint8"):
        fia(**case(atten_mask=TRIANGLE.to(dtype)))
    for legal in (torch.bool, torch.uint8):
        fia(**case(atten_mask=TRIANGLE.to(legal)[None, None]))


def test_R24_compressed_mask_is_the_strict_upper_triangle():
    cut = TRIANGLE | torch.ones(2048, 2048, dtype=torch.int8).tril_(-128)
    with rejects(24, "shifted"):
        fia(**case(atten_mask=cut))
    with use(strict=False), leaves_undefined(24):
        fia(**case(atten_mask=cut))


def test_R25_causal_needs_as_many_keys_as_queries():
    with rejects(25, "s1[4] <= s2[3]"):
        fia(**case(actual_seq_kvlen=[3, 7]))


@pytest.mark.parametrize(
    ("pre", "next_", "word"),
    [
        (-1, 0, "The sum of"),
        (-1, -1, "must not both be negative"),
        (-5, 6, "actualSeqLen[4] + preTokens[-5]"),
        (9, -8, "actualSeqLenKv[7] + nextTokens[-8]"),
    ],
    ids=["sum", "both", "before the queries", "before the keys"],
)
def test_R26_the_band_exists(pre, next_, word):
    with rejects(26, word):
        fia(**case(sparse_mode=4, pre_tokens=pre, next_tokens=next_))


@pytest.mark.parametrize(("pre", "next_"), [(0, 0), (-4, 4), (140, -140)], ids=["itself", "queries' end", "keys' end"])
def test_a_band_may_touch_the_ends(pre, next_):
    broken = attention_case([4], [140], window=True)
    fia(**dict(broken, pre_tokens=pre, next_tokens=next_))


def test_a_band_is_not_asked_of_requests_without_rows_or_without_keys():
    out = {"pre_tokens": -3, "next_tokens": 3}
    fia(**dict(attention_case([4, 0], [140, 7], window=True), **out))
    keyless = attention_case([4, 1], [140, 7], window=True)
    fia(**dict(keyless, **out, actual_seq_kvlen=[140, 0]))
    with rejects_band():
        fia(**dict(keyless, **out))


def rejects_band():
    return pytest.raises(ContractError, match=r"Batch\[1\], actualSeqLen\[1\] \+ preTokens\[-3\].*\[R26\]")


def test_R27_the_band_needs_head_size_64_or_128():
    with rejects(27, "192"):
        fia(**sized(192, heads=2, kv_heads=2, learnable_sink=None, sparse_mode=4, pre_tokens=127, next_tokens=0))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.long(),
        lambda t: t[0],
        lambda t: t[:, 0],
        lambda t: t[..., None],
        lambda t: t[:, :0],
        lambda t: t[:1],
        lambda t: torch.cat([t, t]),
    ],
    ids=["int64", "a request's", "a column", "three dimensions", "empty", "a row short", "rows to spare"],
)
def test_R28_block_table_is_an_int32_row_per_request(change):
    with rejects(28):
        fia(**case(block_table=change(case()["block_table"])))


def test_R29_block_size_of_packed_tokens():
    for block in (16, 64, 192, 1152):
        with rejects(29, f"({block})"):
            fia(**attention_case([4], [70], block=block))
    with use(cann="8.5"):
        fia(**attention_case([4], [70], block=16))
        fia(**attention_case([4], [70], block=1024))
        for block in (0, 24, 1040):
            with rejects(29, f"({block})"):
                fia(**dict(attention_case([4], [70], block=16), block_size=block))
    fia(**attention_case([4], [70], block=1024))


def test_R29_block_size_outside_of_packed_tokens():
    def decode(block: int) -> dict:
        paged = attention_case([1, 1], [140, 7], block=block, sink=False)
        return dict(bsh(), **{name: paged[name] for name in ("key", "value", "block_table", "block_size")})

    for block in (16, 512):
        fia(**decode(block))
    for block in (24, 528):
        with rejects(29, f"({block})", "512"):
            fia(**decode(block))


def test_R30_cache_shapes():
    plain = case()
    four = plain["key"].view(-1, 128, 2, 64)  # vLLM's own shape, which is not [n, N, block, D]
    for key, value in (
        (four, four),
        (plain["key"], four),
        (plain["key"][:, :64],) * 2,
        (plain["key"][0],) * 2,
        (plain["key"], plain["value"][:3]),
    ):
        with rejects(30):
            fia(**dict(plain, key=key, value=value))
    for key, value in ((plain["key"], four), (plain["key"][0],) * 2):
        with rejects(30, "must be equal and in [3, 4, 5]"):
            fia(**{**bsh(), "key": key, "value": value})


def test_R31_cache_rows_are_at_most_65535_wide():
    heads = 1024
    wide = torch.empty(4, 128, heads * 64, dtype=torch.bfloat16, device="meta")
    query = torch.empty(5, heads, 64, dtype=torch.bfloat16, device="meta")
    with use(execute=False), rejects(31, "65536"):
        fia(
            **case(
                query=query, key=wide, value=wide, num_query_heads=heads, num_key_value_heads=heads, learnable_sink=None
            )
        )


def test_cache_rows_may_be_65535_wide():
    cache = torch.empty(4, 128, 65535, dtype=torch.bfloat16, device="meta")
    query = torch.empty(2, 1, 65535, dtype=torch.bfloat16, device="meta")
    with use(execute=False):
        fia(**{**bsh(), "query": query, "key": cache, "value": cache, "num_query_heads": 1, "num_key_value_heads": 1})


def test_R32_the_cache_has_the_blocks_that_lengths_need():
    plain = case()
    with rejects(32, "(2)", "(3)"):
        fia(**dict(plain, key=plain["key"][:2], value=plain["value"][:2]))
    with rejects(32, "every actualSeqLenKV is 0"):
        fia(**case(actual_seq_kvlen=[0, 0]))


@pytest.mark.parametrize("wild", [-1, 4])
def test_R33_block_ids_are_inside_the_cache(wild):
    broken = case()
    broken["block_table"][0, 1] = wild
    with rejects(33, "request 0"):
        fia(**broken)
    with use(strict=False), leaves_undefined(33):
        out, _ = fia(**broken)
    assert out[:4].isnan().all()
    assert out[4:].isfinite().all()
    unread = case()
    unread["block_table"][:, 2] = wild
    fia(**unread)


@pytest.mark.parametrize(
    "changes",
    [
        {"pse_shift": torch.zeros(1)},
        {"dequant_scale_query": torch.zeros(1)},
        {"quant_scale_out": torch.zeros(1)},
        {"query_rope": torch.zeros(5, 8, 64)},
        {"query_rope": torch.zeros(5, 8, 64), "key_rope": torch.zeros(4, 128, 128)},
        {"key_rope": torch.zeros(4, 128, 128)},
        {"query_rope": torch.zeros(5, 8, 64), "key_rope": torch.zeros(4, 128, 64)},
        {"key": torch.zeros(4, 128, 128, dtype=torch.int8)},
    ],
    ids=["pse", "quantised query", "quantised out", "half a rope", "wide", "the other half", "rope at D 64", "int8"],
)
def test_R34_packed_tokens_take_no_extras(changes):
    with rejects(34):
        fia(**case(**changes))


def test_R34_rope_is_64_beside_128():
    def call(query: int, key: int) -> None:
        fia(**sized(128, query_rope=torch.zeros(5, 8, query), key_rope=torch.zeros(4, 128, key)))

    for sizes in ((32, 64), (64, 32)):
        with rejects(34, "must be 64"):
            call(*sizes)
    with pytest.raises(NotEmulatedError, match="split rope"):
        call(64, 64)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_R35_strided_operands_are_right_and_copied_whole_in_every_call(name):
    legal = case()
    tensor = legal[name]
    strided = torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]
    size = tensor.numel() * 2
    with notes(35, f"{name} [", "strides", f"copied whole in every call, {size} bytes"):
        out = fia(**{**legal, name: strided})[0]
    assert torch.equal(out, fia(**legal)[0])
    plain, copied = (fia.traffic(**{**legal, name: value}) for value in (tensor, strided))
    assert copied == (plain.read + size, plain.written + size, plain.launches + 1)


def test_R36_batched_layouts_take_a_three_dimensional_cache():
    four = torch.zeros(4, 2, 128, 64, dtype=torch.bfloat16)
    with rejects(36, "BSH"):
        fia(**{**bsh(), "key": four, "value": four})
    bnsd = {**bsh(), "query": torch.randn(2, 8, 1, 64).bfloat16(), "input_layout": "BNSD"}
    fia(**{**bnsd, "key": four, "value": four})


def test_R37_no_workspace_query_for_packed_tokens():
    with rejects(37, "tiling_schedule_optimize"):
        max_workspace(**case())
    for context in ({"cann": "8.5"}, {"tnd_max_workspace": True}):
        with use(**context):
            max_workspace(**case())
    max_workspace(**bsh())


def test_R38_a_small_workspace_is_not_noticed():
    plain = case()
    out = [torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.empty(1)]
    small = torch.empty(1 << 20, dtype=torch.bfloat16)
    with rejects(38, "2097152 bytes"):
        fia_out(**plain, workspace=small, out=out)
    with use(strict=False), leaves_undefined(38):
        fia_out(**plain, workspace=small, out=out)
    assert out[0].isnan().all()


def decode(*kv_lens: int, **changes: object) -> dict:
    """One query row per request with gpt-oss's heads."""
    return dict(attention_case([1] * len(kv_lens), list(kv_lens), heads=64, kv_heads=8), **changes)


@pytest.mark.parametrize("cann", ["8.5", "9.0", "9.1"])
@pytest.mark.parametrize(
    ("long", "split"),
    [
        (decode(4097, 1), True),
        (decode(513, 1), True),
        (decode(512, 1), False),
        (decode(1030, sparse_mode=4, pre_tokens=127, next_tokens=0), True),  # keys 902 to 1029, over a tile's end
        (decode(1000, sparse_mode=4, pre_tokens=127, next_tokens=0), False),
    ],
    ids=["long", "two tiles", "one tile", "a window over two tiles", "a window in one tile"],
)
def test_R38_from_8_5_on_the_workspace_grows_when_keys_are_split(cann, long, split):
    """A graph captured at short lengths is replayed at long ones, which need more than its capture reserved."""
    short = decode(*[512] * len(long["actual_seq_kvlen"]))
    with use(cann=cann):
        enough = torch.empty((16 << 20) + 20 * 2 * 8 * (512 * 6 + 64 * 8), dtype=torch.uint8)
        fia_out(**short, workspace=enough, out=outputs(short))
        if split:
            with rejects(38, f"{enough.numel() + 20 * 2 * 512 * 320} "):
                fia_out(**long, workspace=enough, out=outputs(long))
        else:
            fia_out(**long, workspace=enough, out=outputs(long))
        asked = max_workspace(**short)
        assert asked.numel() == (16 << 20) + 20 * (2 * 512 * (512 * 6 + 64 * 8) + 2 * 512 * 320)
        fia_out(**long, workspace=asked, out=outputs(long))


def outputs(arguments: dict) -> list[torch.Tensor]:
    return [torch.zeros_like(arguments["query"]), torch.empty(1)]


@pytest.mark.parametrize(
    "out",
    [
        [torch.zeros(4, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 8, 1)],
        [torch.zeros(5, 8, 64), torch.zeros(5, 8, 1)],
        [torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 8, 1, dtype=torch.bfloat16)],
        [torch.zeros(5, 8, 64, dtype=torch.bfloat16)],
        [torch.zeros(8, 5, 64, dtype=torch.bfloat16).transpose(0, 1), torch.zeros(5, 8, 1)],
        [torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(5, 8)],
    ],
    ids=["rows", "dtype", "lse dtype", "one", "strided", "lse shape"],
)
def test_R39_outputs_fit(out):
    with rejects(39):
        fia_out(**case(), return_softmax_lse=True, out=out)


def test_R40_inner_precise():
    with rejects(40, "got 4"):
        fia(**case(inner_precise=4))
    with use(findings=[]) as context:
        fia(**case(inner_precise=7))
    assert [f.rule for f in context.findings] == [40]
    with use(cann="8.5"):
        with rejects(40, "got 1"):
            fia(**case(inner_precise=1))
        for wrong in (-1, 4):
            with rejects(40, f"got {wrong}"):
                fia(**case(inner_precise=wrong, learnable_sink=None))
        fia(**case(inner_precise=3, learnable_sink=None))


def test_R92_up_to_9_0_the_sink_is_read_past_its_end():
    """torch allocates the sink so that it ends in the last 64 bytes of its memory."""
    bare = case(learnable_sink=torch.randn(8).bfloat16())
    for cann in ("8.5", "9.0"):
        with use(cann=cann):
            with rejects(92, "[8] ends with its memory"):
                fia(**bare)
            fia(**case())
    for cann in ("8.3.rc2", "9.1"):
        with use(cann=cann):
            fia(**bare)
    with use(cann="9.0", strict=False), leaves_undefined(92):
        out, _ = fia(**bare)
    assert out.isfinite().all(), "what is read too much is not used"


@pytest.mark.parametrize(
    "broken",
    [case(learnable_sink=torch.randn(40).half()[:8]), sized(128)],
    ids=["float16", "another head size"],
)
def test_R93_from_9_0_on_another_sink_means_another_kernel(broken):
    for cann in ("9.0", "9.1"):
        with use(cann=cann), rejects(93, "split fuse"):
            fia(**broken)
    with use(cann="9.1", strict=False), leaves_undefined(93):
        assert fia(**broken)[0].isnan().all()
    with use(cann="9.1"):
        fia(**case())
        with rejects(93):
            fia_out(**broken, out=outputs(broken))


def test_R04_before_9_0_a_float16_sink_is_refused():
    for cann in ("8.3.rc1", "8.5"):
        with use(cann=cann), rejects(4, "bfloat16", "float16"):
            fia(**case(learnable_sink=torch.zeros(40).half()[:8]))


# Layouts other than packed tokens, as in vllm-ascend's own attention


def test_R08_ranks_outside_of_packed_tokens():
    for layout, size in (("BSH", (2, 1, 8, 64)), ("BSND", (2, 1, 512)), ("BNSD", (2, 8, 64))):
        with rejects(8, layout):
            fia(**{**bsh(), "input_layout": layout, "query": torch.zeros(size).bfloat16()})


@pytest.mark.parametrize(
    "changes",
    [
        {"input_layout": "BSND", "query": torch.zeros(2, 1, 4, 64).bfloat16()},
        {"input_layout": "BNSD", "query": torch.zeros(2, 4, 1, 64).bfloat16()},
        {"num_key_value_heads": 3},
        {"num_query_heads": 65, "num_key_value_heads": 1, "query": torch.zeros(2, 1, 65 * 64).bfloat16()},
        {"query": torch.zeros(2, 1, 513).bfloat16()},
        {"num_query_heads": -8},
        {"num_query_heads": 0},
    ],
    ids=["BSND", "BNSD", "no whole ratio", "more than 64 to a key", "no whole heads", "negative", "none"],
)
def test_R09_heads_outside_of_packed_tokens(changes):
    with rejects(9):
        fia(**{**bsh(), **changes})


def test_64_heads_may_share_a_key_outside_of_packed_tokens():
    key = torch.randn(2, 7, 64).bfloat16()
    fia_v1(torch.randn(2, 7, 64 * 64).bfloat16(), key, key, num_heads=64, num_key_value_heads=1, input_layout="BSH")


def test_R11_paged_keys_have_lengths():
    with rejects(11, "blockTable"):
        fia(**{**bsh(), "actual_seq_kvlen": None})


@pytest.mark.parametrize("name", ["actual_seq_qlen", "actual_seq_kvlen"])
def test_R13_one_length_a_request_or_one_for_all(name):
    fia(**{**bsh(), name: [1]})
    with rejects(13, "3 entries, batch is 2"):
        fia(**{**bsh(), name: [1, 1, 1]})


def test_R14_lengths_outside_of_packed_tokens_are_not_negative():
    with rejects(14, "-1"):
        fia(**{**bsh(), "actual_seq_kvlen": [140, -1]})
    fia(**{**bsh(), "actual_seq_kvlen": [140, 0]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_layout": "SBH"}, r"inputlayout\(SBH\) only support"),
        ({"sparse_mode": 5}, "sparse_mode should be 0 to 4 for BSH, got 5"),
        ({"query": torch.zeros(2, 1, 512)}, "should all be float16 or bfloat16, got .*float32"),
        (
            {"query": torch.zeros(2, 1, 512), **dict.fromkeys(("key", "value"), torch.zeros(4, 128, 128))},
            "should all be float16 or bfloat16, got .*float32",
        ),
        ({"key": torch.zeros(4, 128, 128).half()}, "should all be float16 or bfloat16, got .*bfloat16.*float16"),
        ({"dequant_scale_query": torch.zeros(1)}, "no quantisation, pse_shift or rope for layout BSH"),
        ({"pse_shift": torch.zeros(1)}, "no quantisation, pse_shift or rope for layout BSH"),
    ],
    ids=["layout", "sparse mode", "query in float32", "float32", "mixed", "quantised", "pse"],
)
def test_arguments_that_no_layout_takes_are_refused(changes, words):
    with pytest.raises(ContractError, match=words):
        fia(**{**bsh(), **changes})


def test_float16_is_legal_outside_of_packed_tokens():
    half = {name: bsh()[name].half() for name in ("query", "key", "value")}
    fia(**{**bsh(), **half})


def test_shared_prefixes_are_refused():
    key = torch.randn(2, 7, 128).bfloat16()
    call = {"num_heads": 8, "num_key_value_heads": 2, "input_layout": "BSH"}
    fia_v1(torch.randn(2, 7, 512).bfloat16(), key, key, **call)
    with pytest.raises(ContractError, match=r"not supported on a 910B: .*'key_shared_prefix'"):
        fia_v1(torch.randn(2, 7, 512).bfloat16(), key, key, **call, key_shared_prefix=key)


def test_operands_on_the_host_are_refused():
    with use(is_device=lambda t: t is not TRIANGLE), pytest.raises(ContractError, match="atten_mask is on cpu"):
        fia(**case())
    assert current().is_device(TRIANGLE)
