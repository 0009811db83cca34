"""R01 to R40, R92 and R93: a legal call like gpt-oss's, broken in one point."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from ascend_emulator.context import CANN_VERSIONS, current, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import ContractError, NotEmulatedError

from emulator.tests.contracts import (
    TRIANGLE,
    Broken,
    Run,
    attention_case,
    broken_calls,
    check_refusal,
    leaves_undefined,
    legal_calls,
    notes,
    of,
    rejects,
    under,
)

fia = OPS["npu::npu_fused_infer_attention_score_v2"]
fia_out = OPS["npu::npu_fused_infer_attention_score_v2.out"]
max_workspace = OPS["npu::_npu_fused_infer_attention_score_v2_get_max_workspace"]
fia_v1 = OPS["npu::npu_fused_infer_attention_score"]


def bf16(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def huge(*size: int) -> torch.Tensor:
    """Takes no memory, and is not computed with."""
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


def case(**changes: object) -> dict:
    """Two requests: a chunk of 4 tokens behind 136 cached ones, and a decode at 7."""
    return attention_case([4, 1], [140, 7]) | changes


def unpaged(**changes: object) -> dict:
    keys = {"key": torch.randn(147, 2, 64).bfloat16(), "value": torch.randn(147, 2, 64).bfloat16()}
    return case(**keys) | {"block_table": None, "block_size": 0, "actual_seq_kvlen": [140, 147]} | changes


def bsh(**changes: object) -> dict:
    own = {"query": torch.randn(2, 1, 512).bfloat16(), "input_layout": "BSH", "sparse_mode": 0, "atten_mask": None}
    return case(**own) | {"actual_seq_qlen": [1, 1], "learnable_sink": None} | changes


def sized(dim: int, *, heads: int = 8, kv_heads: int = 2, **changes: object) -> dict:
    return attention_case([4, 1], [140, 7], dim=dim, heads=heads, kv_heads=kv_heads) | changes


def one(block: int, **changes: object) -> dict:
    """A request of 4 tokens, in blocks of this size."""
    return attention_case([4], [70], block=block) | changes


def band(**changes: object) -> dict:
    return attention_case([4], [140], window=True) | changes


def many(**changes: object) -> dict:
    """As many requests as fit into a call."""
    sizes = {"query": huge(4096, 8, 64), "key": huge(4096, 128, 128), "value": huge(4096, 128, 128)}
    table = torch.empty(4096, 1, dtype=torch.int32, device="meta")
    return case(**sizes, block_table=table, actual_seq_qlen=list(range(1, 4097)), actual_seq_kvlen=[128] * 4096)


def call(make: Callable[..., dict] = case, **changes: object) -> Run:
    return of(fia, make, **changes)


def decode_of_bsh(block: int) -> dict:
    paged = attention_case([1, 1], [140, 7], block=block, sink=False)
    return bsh(**{name: paged[name] for name in ("key", "value", "block_table", "block_size")})


def of_version_1(**changes: object) -> dict:
    names = {"actual_seq_qlen": "actual_seq_lengths", "actual_seq_kvlen": "actual_seq_lengths_kv",
             "num_query_heads": "num_heads", "softmax_scale": "scale"}  # fmt: skip
    return {names.get(name, name): value for name, value in case(**changes).items()}


def half(**changes: object) -> dict:
    sink = case()["learnable_sink"]
    return attention_case([4, 1], [140, 7], dtype=torch.float16) | {"learnable_sink": sink} | changes


def float32() -> dict:
    return attention_case([4, 1], [140, 7], dtype=torch.float32, sink=False)


WIDE = {"heads": 2, "kv_heads": 2}
TABLE, KEY, VALUE = (case()[name] for name in ("block_table", "key", "value"))
FOUR = KEY.view(-1, 128, 2, 64)  # vLLM's own shape, which is not [n, N, block, D]
ROPE = torch.zeros(5, 8, 64)
A_SINK_OF_65536 = {"num_query_heads": 1024, "num_key_value_heads": 1024, "learnable_sink": None}
OUT = bf16(5, 8, 64)


def into(*out: torch.Tensor) -> Run:
    return of(fia_out, case, return_softmax_lse=True, out=list(out))


BROKEN: Broken = {
    1: {"a sink outside of packed tokens": (call(bsh, learnable_sink=bf16(8)), "TND", "BSH")},
    2: {"version 1 has no sink": (of(fia_v1, of_version_1), "learnable_sink")},
    3: {
        "a sink of two dimensions": (call(learnable_sink=bf16(1, 8)), "(2)"),
        "a sink short of a head": (call(learnable_sink=bf16(7)), "(7)"),
    },
    4: {
        "float32": (call(learnable_sink=torch.zeros(8)), "bfloat16", "float32"),
        **{
            f"float16 before 9.0, {cann}": (
                under(call(learnable_sink=torch.zeros(40).half()[:8]), cann=cann), "bfloat16", "float16",
            )
            for cann in ("8.3.rc1", "8.5")
        },
    },
    5: {
        "another head size": (call(sized, dim=192, **WIDE, sparse_mode=3), "64/128", "192"),
        "on 8.5": (under(call(sized, dim=192, **WIDE, sparse_mode=3), cann="8.5"),),
    },
    6: {
        "float32 is for diagnosis": (under(call(float32), cann="8.3.rc2"), "float32"),
        "on 8.5": (under(call(float32), cann="8.5"), "float32"),
        "packed tokens in float16": (call(half), "bf16", "float16"),
        "mixed": (under(lambda: fia(**half(key=half()["key"].bfloat16())), cann="8.5"), "float16/bfloat16"),
    },
    7: {
        "96": (call(sized, dim=96, sparse_mode=3), "96"),
        "grouped 192": (call(sized, dim=192, learnable_sink=None), "192"),
    },
    8: {
        "two dimensions": (call(query=bf16(5, 512)), "[5, 512]"),
        "four": (call(unpaged, key=bf16(1, 147, 2, 64), value=bf16(1, 147, 2, 64)), "[1, 147, 2, 64]"),
        "BSH": (call(bsh, query=bf16(2, 1, 8, 64)), "BSH"),
        "BSND": (call(bsh, input_layout="BSND", query=bf16(2, 1, 512)), "BSND"),
        "BNSD": (call(bsh, input_layout="BNSD", query=bf16(2, 8, 64)), "BNSD"),
    },
    9: {
        "not the query's": (call(num_query_heads=4, learnable_sink=None),),
        "no whole ratio": (call(num_key_value_heads=3),),
        "negative": (call(num_key_value_heads=-2),),
        "not the keys'": (call(unpaged, num_key_value_heads=4), "keyN(2)"),
        "65 to a key": (lambda: fia(**attention_case([1], [3], heads=65, kv_heads=1)), "at most 64"),
        "BSND": (call(bsh, input_layout="BSND", query=bf16(2, 1, 4, 64)),),
        "BNSD": (call(bsh, input_layout="BNSD", query=bf16(2, 4, 1, 64)),),
        "BSH, no whole ratio": (call(bsh, num_key_value_heads=3),),
        "BSH, 65 to a key": (call(bsh, num_query_heads=65, num_key_value_heads=1, query=bf16(2, 1, 65 * 64)),),
        "no whole heads": (call(bsh, query=bf16(2, 1, 513)),),
        "BSH, negative": (call(bsh, num_query_heads=-8),),
        "BSH, none": (call(bsh, num_query_heads=0),),
    },
    10: {"left at zero": (call(num_key_value_heads=0), "num_key_value_heads is 0", "division by zero")},
    11: {
        **{
            f"{name} {value}": (call(**{name: value}),)
            for name in ("actual_seq_qlen", "actual_seq_kvlen")
            for value in (None, [])
        },
        "paged keys without lengths": (call(bsh, actual_seq_kvlen=None), "blockTable"),
    },
    13: {
        "another number": (call(actual_seq_kvlen=[140, 7, 1]), "(2)", "(3)"),
        "4097 queries": (call(actual_seq_qlen=[5] * 4097), "4097", "4096"),
        "4097 keys": (call(actual_seq_kvlen=[1] * 4097), "4097", "4096"),
        "BSH, queries": (call(bsh, actual_seq_qlen=[1, 1, 1]), "3 entries, batch is 2"),
        "BSH, keys": (call(bsh, actual_seq_kvlen=[1, 1, 1]), "3 entries, batch is 2"),
    },
    14: {
        "negative": (call(actual_seq_qlen=[-1, 5]),),
        "decreasing": (call(actual_seq_qlen=[6, 5]),),
        "negative keys": (call(actual_seq_kvlen=[140, -1]), "actualSequenceLengthKV[1]=-1"),
        "BSH, negative keys": (call(bsh, actual_seq_kvlen=[140, -1]), "-1"),
    },
    15: {
        "one short": (call(actual_seq_qlen=[4, 4]), "561002", "queryT(5)", "(4)"),
        "one long": (call(actual_seq_qlen=[4, 6]), "561002", "queryT(5)", "(6)"),
    },
    16: {
        "decreasing": (call(unpaged, actual_seq_kvlen=[150, 147]),),
        "not all keys": (call(unpaged, actual_seq_kvlen=[140, 146]),),
    },
    17: {"cumulative": (call(actual_seq_kvlen=[140, 128 * 3 + 1]), "per request", "[2, 3]")},
    18: {
        "a million tokens and one": (
            under(call(query=huge((1 << 20) + 1, 8, 64), actual_seq_qlen=[1, (1 << 20) + 1]), execute=False),
            "1048577",
        )
    },
    19: {f"mode {mode}": (call(sparse_mode=mode), f"sparseMode = {mode}") for mode in (1, 2, 5)},
    20: {"a mask in mode 0": (call(sparse_mode=0), "[2048, 2048]")},
    21: {
        f"mode {mode}, {mask}": (call(sparse_mode=mode, atten_mask=mask),)
        for mode in (3, 4)
        for mask in (None, torch.zeros(0, dtype=torch.int8))
    },
    22: {
        f"{shape}": (
            under(call(atten_mask=torch.zeros(shape, dtype=torch.int8, device="meta")), execute=False),
            "(2048, 2048)",
            str(shape[-1]),
        )
        for shape in ((2048, 2047), (2, 2048, 2048), (140, 140))
    },
    23: {
        f"{dtype}": (call(atten_mask=TRIANGLE.to(dtype)), "bool, int8 or uint8")
        for dtype in (torch.bfloat16, torch.float32, torch.int32)
    },
    25: {"fewer keys than queries": (call(actual_seq_kvlen=[3, 7]), "s1[4] <= s2[3]")},
    26: {
        words: (call(sparse_mode=4, pre_tokens=before, next_tokens=behind), words)
        for before, behind, words in (
            (-1, 0, "The sum of"),
            (-1, -1, "must not both be negative"),
            (-5, 6, "actualSeqLen[4] + preTokens[-5]"),
            (9, -8, "actualSeqLenKv[7] + nextTokens[-8]"),
        )
    },
    27: {
        "192": (
            call(sized, dim=192, **WIDE, learnable_sink=None, sparse_mode=4, pre_tokens=127, next_tokens=0), "192",
        )
    },
    28: {
        "int64": (call(block_table=TABLE.long()),),
        "a request's": (call(block_table=TABLE[0]),),
        "a column": (call(block_table=TABLE[:, 0]),),
        "three dimensions": (call(block_table=TABLE[..., None]),),
        "empty": (call(block_table=TABLE[:, :0]),),
        "a row short": (call(block_table=TABLE[:1]),),
        "rows to spare": (call(block_table=torch.cat([TABLE, TABLE])),),
    },
    29: {
        **{f"{block}": (call(one, block=block), f"({block})") for block in (16, 64, 192, 1152)},
        **{
            f"{block} on 8.5": (under(call(one, block=16, block_size=block), cann="8.5"), f"({block})")
            for block in (0, 24, 1040)
        },
        **{f"BSH, {block}": (call(decode_of_bsh, block=block), f"({block})", "512") for block in (24, 528)},
    },
    30: {
        "vLLM's shape": (call(key=FOUR, value=FOUR),),
        "one of them": (call(value=FOUR),),
        "another block": (call(key=KEY[:, :64], value=KEY[:, :64]),),
        "a block": (call(key=KEY[0], value=KEY[0]),),
        "fewer values": (call(value=VALUE[:3]),),
        "BSH, one of them": (call(bsh, key=KEY, value=FOUR), "must be equal and in [3, 4, 5]"),
        "BSH, a block": (call(bsh, key=KEY[0], value=KEY[0]), "must be equal and in [3, 4, 5]"),
    },
    31: {
        "65536": (
            under(
                call(query=huge(5, 1024, 64), key=huge(4, 128, 65536), value=huge(4, 128, 65536), **A_SINK_OF_65536),
                execute=False,
            ),
            "65536",
        )
    },
    32: {
        "fewer blocks": (call(key=KEY[:2], value=VALUE[:2]), "(2)", "(3)"),
        "no key": (call(actual_seq_kvlen=[0, 0]), "every actualSeqLenKV is 0"),
    },
    34: {
        "pse": (call(pse_shift=torch.zeros(1)),),
        "quantised query": (call(dequant_scale_query=torch.zeros(1)),),
        "quantised out": (call(quant_scale_out=torch.zeros(1)),),
        "half a rope": (call(query_rope=ROPE),),
        "wide": (call(query_rope=ROPE, key_rope=torch.zeros(4, 128, 128)),),
        "the other half": (call(key_rope=torch.zeros(4, 128, 128)),),
        "rope at D 64": (call(query_rope=ROPE, key_rope=torch.zeros(4, 128, 64)),),
        "int8": (call(key=torch.zeros(4, 128, 128, dtype=torch.int8)),),
        **{
            f"rope of {query} and {key}": (
                call(sized, dim=128, query_rope=torch.zeros(5, 8, query), key_rope=torch.zeros(4, 128, key)),
                "must be 64",
            )
            for query, key in ((32, 64), (64, 32))
        },
    },
    36: {"a cache of four dimensions": (call(bsh, key=bf16(4, 2, 128, 64), value=bf16(4, 2, 128, 64)), "BSH")},
    37: {"packed tokens": (of(max_workspace, case), "tiling_schedule_optimize")},
    39: {
        "rows": (into(bf16(4, 8, 64), torch.zeros(5, 8, 1)),),
        "dtype": (into(torch.zeros(5, 8, 64), torch.zeros(5, 8, 1)),),
        "lse dtype": (into(OUT, bf16(5, 8, 1)),),
        "one": (into(OUT),),
        "strided": (into(bf16(8, 5, 64).transpose(0, 1), torch.zeros(5, 8, 1)),),
        "lse shape": (into(OUT, torch.zeros(5, 8)),),
    },
    40: {
        "4": (call(inner_precise=4), "got 4"),
        "1 on 8.5": (under(call(inner_precise=1), cann="8.5"), "got 1"),
        **{
            f"{wrong} on 8.5": (under(call(inner_precise=wrong, learnable_sink=None), cann="8.5"), f"got {wrong}")
            for wrong in (-1, 4)
        },
    },
    # arguments that no layout takes
    0: {
        "layout": (call(bsh, input_layout="SBH"), "inputlayout(SBH) only support"),
        "sparse mode": (call(bsh, sparse_mode=5), "sparse_mode should be 0 to 4 for BSH, got 5"),
        "query in float32": (call(bsh, query=torch.zeros(2, 1, 512)), "should all be float16 or bfloat16", "float32"),
        "float32": (
            call(bsh, query=torch.zeros(2, 1, 512), **dict.fromkeys(("key", "value"), torch.zeros(4, 128, 128))),
            "should all be float16 or bfloat16",
        ),
        "mixed": (call(bsh, key=torch.zeros(4, 128, 128).half()), "should all be float16 or bfloat16"),
        "quantised": (call(bsh, dequant_scale_query=torch.zeros(1)), "no quantisation, pse_shift or rope for layout"),
        "pse": (call(bsh, pse_shift=torch.zeros(1)), "no quantisation, pse_shift or rope for layout BSH"),
        "a mask on the host": (under(call(), is_device=lambda t: t is not TRIANGLE), "atten_mask is on cpu"),
    },
}  # fmt: skip


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)


LEGAL = {
    **{
        f"{make.__name__} on {cann}, lse {lse}": under(call(make, return_softmax_lse=lse), cann=cann)
        for make in (case, unpaged, bsh)
        for cann in CANN_VERSIONS
        for lse in (False, True)
    },
    "float32 sink for diagnosis": under(call(learnable_sink=torch.zeros(8)), diagnostic_fp32=True),
    "float16 on 8.5": under(call(half), cann="8.5"),
    "64 heads to a key": lambda: fia(**attention_case([1], [3], heads=64, kv_heads=1)),
    "4096 requests": under(call(many), execute=False),
    "a request without rows": call(actual_seq_qlen=[0, 5]),
    "unpaged requests without rows": call(unpaged, actual_seq_qlen=[5, 5], actual_seq_kvlen=[147, 147]),
    "no block to spare": lambda: fia(**attention_case([4, 1], [140, 7], spare=0)),
    "a million tokens": under(
        call(query=huge(1 << 20, 8, 64), actual_seq_qlen=[1, 1 << 20], sparse_mode=0, atten_mask=None), execute=False
    ),
    **{f"a mask of {dtype}": call(atten_mask=TRIANGLE.to(dtype)[None, None]) for dtype in (torch.bool, torch.uint8)},
    **{
        f"a band of {before}, {behind}": call(band, pre_tokens=before, next_tokens=behind)
        for before, behind in ((0, 0), (-4, 4), (140, -140))
    },
    **{f"blocks of {block} on 8.5": under(call(one, block=block), cann="8.5") for block in (16, 1024)},
    "blocks of 1024": call(one, block=1024),
    **{f"BSH, blocks of {block}": call(decode_of_bsh, block=block) for block in (16, 512)},
    "a cache 65535 wide": under(
        call(
            bsh, query=huge(2, 1, 65535), key=huge(4, 128, 65535), value=huge(4, 128, 65535), num_query_heads=1,
            num_key_value_heads=1,
        ),
        execute=False,
    ),
    "BNSD, a cache of four dimensions": call(
        bsh, query=bf16(2, 8, 1, 64), input_layout="BNSD", key=bf16(4, 2, 128, 64), value=bf16(4, 2, 128, 64)
    ),
    "workspace on 8.5": under(of(max_workspace, case), cann="8.5"),
    "workspace of packed tokens": under(of(max_workspace, case), tnd_max_workspace=True),
    "workspace of BSH": of(max_workspace, bsh),
    "inner_precise 3 on 8.5": under(call(inner_precise=3, learnable_sink=None), cann="8.5"),
    "one query length for all": call(bsh, actual_seq_qlen=[1]),
    "one key length for all": call(bsh, actual_seq_kvlen=[1]),
    "BSH, a request without keys": call(bsh, actual_seq_kvlen=[140, 0]),
    "BSH in float16": lambda: fia(**bsh(**{name: bsh()[name].half() for name in ("query", "key", "value")})),
}  # fmt: skip


@legal_calls(LEGAL)
def test_legal_call_is_refused(run):
    with use(findings=[]) as context:
        run()
    assert not context.findings


def test_head_size_192_meets_values_of_128():
    wide = sized(192, **WIDE, learnable_sink=None)
    out, _ = fia(**wide | {"value": wide["value"][..., : 2 * 128].contiguous()})
    assert out.shape == (5, 2, 128)


def test_R12_device_lengths_refuse_under_capture_and_are_noted_in_eager():
    on_device = case(actual_seq_qlen=torch.tensor([4, 5]))
    with use(capturing=True), rejects(12, "107027"):
        fia(**on_device)
    with use(findings=[]) as context:
        fia(**on_device)
    assert [f.rule for f in context.findings] == [12]
    with use(capturing=True, is_device=lambda t: t.dtype != torch.int64):
        fia(**on_device)  # a host tensor is as good as a list


def test_R24_compressed_mask_is_the_strict_upper_triangle():
    cut = TRIANGLE | torch.ones(2048, 2048, dtype=torch.int8).tril_(-128)
    with rejects(24, "shifted"):
        fia(**case(atten_mask=cut))
    with use(strict=False), leaves_undefined(24):
        fia(**case(atten_mask=cut))


def test_a_band_is_not_asked_of_requests_without_rows_or_without_keys():
    out = {"pre_tokens": -3, "next_tokens": 3}
    fia(**attention_case([4, 0], [140, 7], window=True) | out)
    keyless = attention_case([4, 1], [140, 7], window=True) | out
    fia(**keyless | {"actual_seq_kvlen": [140, 0]})
    with pytest.raises(ContractError, match=r"Batch\[1\], actualSeqLen\[1\] \+ preTokens\[-3\].*\[R26\]"):
        fia(**keyless)


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


def test_split_rope_is_legal_and_not_emulated():
    with pytest.raises(NotEmulatedError, match="split rope"):
        fia(**sized(128, query_rope=ROPE, key_rope=torch.zeros(4, 128, 64)))


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


@pytest.mark.parametrize("name", ["key", "value"])
def test_R35_strided_keys_and_values_are_refused_on_cann_9_1(name):
    legal = case()
    strided = torch.stack([legal[name]] * 2, -1)[..., 0]
    with use(cann="9.1"), rejects(35, f"{name} [", "should be contiguous"):
        fia(**{**legal, name: strided})


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
    return attention_case([1] * len(kv_lens), list(kv_lens), heads=64, kv_heads=8) | changes


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
        with rejects(38, f"{enough.numel() + 20 * 2 * 512 * 320} ") if split else nullcontext():
            fia_out(**long, workspace=enough, out=outputs(long))
        asked = max_workspace(**short)
        assert asked.numel() == (16 << 20) + 20 * (2 * 512 * (512 * 6 + 64 * 8) + 2 * 512 * 320)
        fia_out(**long, workspace=asked, out=outputs(long))


def outputs(arguments: dict) -> list[torch.Tensor]:
    return [torch.zeros_like(arguments["query"]), torch.empty(1)]


def test_an_inner_precise_above_its_range_is_noted():
    with use(findings=[]) as context:
        fia(**case(inner_precise=7))
    assert [f.rule for f in context.findings] == [40]


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
    "broken", [case(learnable_sink=torch.randn(40).half()[:8]), sized(128)], ids=["float16", "another head size"]
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


# Layouts other than packed tokens, as in vllm-ascend's own attention


def test_64_heads_may_share_a_key_outside_of_packed_tokens():
    key = torch.randn(2, 7, 64).bfloat16()
    fia_v1(torch.randn(2, 7, 64 * 64).bfloat16(), key, key, num_heads=64, num_key_value_heads=1, input_layout="BSH")


def test_shared_prefixes_are_refused():
    key = torch.randn(2, 7, 128).bfloat16()
    call = {"num_heads": 8, "num_key_value_heads": 2, "input_layout": "BSH"}
    fia_v1(torch.randn(2, 7, 512).bfloat16(), key, key, **call)
    with pytest.raises(ContractError, match=r"not supported on a 910B: .*'key_shared_prefix'"):
        fia_v1(torch.randn(2, 7, 512).bfloat16(), key, key, **call, key_shared_prefix=key)
    assert current().is_device(TRIANGLE)
