"""R66 to R77: activations, norms, rotary embeddings, cache writes, formats."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.ops.rope import forget_process_state
from ascend_emulator.rules import ContractError

from emulator.tests.contracts import leaves_undefined, rejects

clipped = OPS["npu::npu_clipped_swiglu"]
swiglu = OPS["npu::npu_swiglu"]
dequant = OPS["npu::npu_dequant_swiglu_quant"]
add_norm = OPS["npu::npu_add_rms_norm"]
norm = OPS["npu::npu_rms_norm"]
apply_rope = OPS["npu::npu_apply_rotary_pos_emb"]
rotary_mul = OPS["npu::npu_rotary_mul"]
mrope = OPS["npu::npu_mrope"]
rotary = OPS["atb::_npu_rotary_embedding"]
write = OPS["atb::_npu_reshape_and_cache"]
scatter = OPS["npu::npu_scatter_pa_kv_cache"]
gmm = OPS["npu::npu_grouped_matmul"]


@pytest.fixture(autouse=True)
def new_process():
    forget_process_state()
    yield
    forget_process_state()


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size).bfloat16()


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.3.rc2"])
def test_R66_clipped_swiglu_is_missing(cann):
    with use(cann=cann), rejects(66, "has no attribute 'npu_clipped_swiglu'"):
        clipped(bf16(2, 4))


@pytest.mark.parametrize(
    ("x", "groups"),
    [
        (torch.zeros(2, 3), None),
        (torch.zeros(4), None),
        (torch.zeros(4, 2).T, None),
        (torch.zeros(2, 4), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(2, 4), torch.zeros(1, 1, dtype=torch.int64)),
        (torch.zeros(2, 4, dtype=torch.float64), None),
    ],
    ids=["odd", "one dimension", "strided", "int32 groups", "two-dimensional groups", "float64"],
)
def test_R67_clipped_swiglu(x, groups):
    with use(cann="8.5"), rejects(67):
        clipped(x, group_index=groups)


def test_R68_swiglu_needs_halves():
    with rejects(68, "[2, 3]"):
        swiglu(bf16(2, 3))
    swiglu(bf16(2, 3), dim=0)
    with pytest.raises(ContractError, match="x should be float16, bfloat16 or float32, got float64"):
        swiglu(torch.zeros(2, 4, dtype=torch.float64))


WRONG_QUANTISED = {
    "no scales": (torch.zeros(2, 128, dtype=torch.int32), {"quant_mode": 1}),
    "static groups": (torch.zeros(2, 128).bfloat16(), {"group_index": torch.tensor([2])}),
    "odd": (torch.zeros(2, 127).bfloat16(), {"quant_mode": 1}),
    "unaligned": (torch.zeros(2, 64).bfloat16(), {"quant_mode": 1}),
    "wide": (torch.zeros(1, 2 * 10560).bfloat16(), {"quant_mode": 1}),
    "float32": (torch.zeros(2, 128), {"quant_mode": 1}),
    "no activation scale": (torch.zeros(2, 128, dtype=torch.int32), {"quant_mode": 1, "weight_scale": torch.ones(128)}),
    "no weight scale": (torch.zeros(2, 128, dtype=torch.int32), {"quant_mode": 1, "activation_scale": torch.ones(2)}),
    "odd with an aligned half": (torch.zeros(2, 129).bfloat16(), {"quant_mode": 1}),
}


@pytest.mark.parametrize(("x", "extra"), WRONG_QUANTISED.values(), ids=WRONG_QUANTISED)
def test_R69_dequant_swiglu_quant(x, extra):
    with rejects(69):
        dequant(x, **extra)
    dequant(torch.zeros(2, 128).bfloat16(), quant_mode=1, group_index=torch.tensor([2]))


def test_dequant_swiglu_quant_takes_legal_calls():
    scales = {"weight_scale": torch.full((128,), 0.5), "activation_scale": torch.tensor([1.0, 2.0])}
    x = torch.arange(256, dtype=torch.int32).view(2, 128) % 5
    out, scale = dequant(x, **scales, quant_mode=1, swiglu_mode=1)
    plain, plain_scale = dequant((x * 0.5 * torch.tensor([[1.0], [2.0]])).half(), quant_mode=1, swiglu_mode=1)
    assert torch.equal(out, plain)
    assert torch.equal(scale, plain_scale)
    dequant(torch.zeros(1, 2 * 10496).bfloat16(), quant_mode=1)
    dequant(torch.zeros(2, 128).bfloat16())  # static, without groups
    with use(diagnostic_fp32=True):
        dequant(torch.zeros(2, 128), quant_mode=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (bf16(2, 8), bf16(2, 8), torch.ones(8)),
        lambda: (bf16(2, 8), torch.randn(2, 8), bf16(8)),
        lambda: (bf16(2, 8), bf16(1, 8), bf16(8)),
        lambda: (bf16(0, 8), bf16(0, 8), bf16(8)),
        lambda: (bf16(2, 8), bf16(2, 8), bf16(8), -1e-6),
        lambda: (bf16(*[1] * 9), bf16(*[1] * 9), bf16(1)),
        lambda: [torch.ones(()).bfloat16()] * 3,
    ],
    ids=["gamma float32", "mixed", "shapes", "empty", "epsilon", "nine dimensions", "none"],
)
def test_R70_add_rms_norm(make):
    with rejects(70):
        add_norm(*make())
    for size in ((8,), (*[1] * 7, 8)):
        add_norm(bf16(*size), bf16(*size), bf16(8), 0.0)


@pytest.mark.parametrize("gamma", [(4,), (1, 8), (2, 8, 1), (1, 2, 8)])
def test_gamma_has_the_trailing_dimensions(gamma):
    for op in (norm, lambda x, g: add_norm(x, x, g)):
        op(bf16(2, 8), bf16(2, 8))
        with pytest.raises(ContractError, match="gamma should have x's trailing dimensions"):
            op(bf16(2, 8), bf16(*gamma))


def test_R71_rms_norm_pairs():
    with rejects(71, "float32-bfloat16"):
        norm(torch.randn(2, 8), bf16(8))
    norm(bf16(2, 8), torch.ones(8))


@pytest.mark.parametrize(
    ("size", "table", "extra"),
    [
        ((1, 3, 2, 64), (1, 3, 1, 64), {}),
        ((3, 2, 128), (3, 1, 128), {}),
        ((1, 3, 2, 128), (1, 3, 1, 128), {"layout": "BNSD"}),
        ((1, 3, 2, 128), (1, 3, 2, 128), {}),
        ((1, 0, 2, 128), (1, 0, 1, 128), {}),
    ],
    ids=["D 64", "rank", "layout", "cos heads", "empty"],
)
def test_R72_apply_rotary_pos_emb(size, table, extra):
    with rejects(72):
        apply_rope(bf16(*size), bf16(*size), bf16(*table), bf16(*table), **extra)


def test_rotary_modes_have_names():
    for op in (
        lambda mode: rotary_mul(*[bf16(1, 3, 2, 64)] * 3, mode),
        lambda mode: apply_rope(*heads(128), "BSH", mode),
    ):
        for mode in ("half", "interleave"):
            op(mode)
        with pytest.raises(ContractError, match="interleave, but got whole"):
            op("whole")


def heads(dim: int) -> list[torch.Tensor]:
    return [bf16(1, 3, count, dim) for count in (2, 1, 1, 1)]


def test_R72_head_size_64_from_8_5_only():
    with use(cann="8.5"):
        apply_rope(*heads(64))
    with rejects(72, "D should be 128"):
        apply_rope(*heads(64))


def test_R72_apply_rotary_pos_emb_shares_one_dtype():
    q, t = bf16(1, 3, 2, 128), torch.randn(1, 3, 1, 128)
    with rejects(72, "float32"):
        apply_rope(q, q.clone(), t, t)


@pytest.mark.parametrize(
    ("x", "cos", "sin"),
    [
        ((3, 2, 64), (3, 1, 64), (3, 1, 64)),
        ((1, 3, 2, 63), (1, 3, 1, 63), (1, 3, 1, 63)),
        ((1, 3, 2, 896), (1, 3, 1, 896), (1, 3, 1, 896)),
        ((1, 3, 2, 64), (1, 3, 1, 64), (1, 1, 2, 64)),
        ((2, 3, 2, 64), (1, 1, 1, 64), (1, 1, 1, 64)),
        ((1, 3, 2, 64), (1, 3, 1, 32), (1, 3, 1, 32)),
    ],
    ids=["rank", "odd", "wide", "cos and sin", "broadcast", "D"],
)
def test_R73_rotary_mul(x, cos, sin):
    with rejects(73):
        rotary_mul(bf16(*x), bf16(*cos), bf16(*sin))


WRONG_MROPE = {
    "rank": {"query": bf16(3, 2, 64)},
    "dtype": {"cos_sin_cache": torch.randn(9, 64)},
    "head size": {"head_size": 48, "query": bf16(3, 96), "key": bf16(3, 48)},
    "rotary_dim": {"cos_sin_cache": bf16(9, 128)},
    "rows": {"query": bf16(4, 128)},
    "rank with whole heads": {"query": bf16(3, 64, 2)},
    "head size % 32": {"head_size": 48, "query": bf16(3, 96), "key": bf16(3, 48), "cos_sin_cache": bf16(9, 32)},
    "key's rows": {"key": bf16(4, 64)},
    "query's heads": {"query": bf16(3, 96)},
    "key's heads": {"key": bf16(3, 96)},
    "rotary_dim % 32": {"cos_sin_cache": bf16(9, 48)},
    "positions of two dimensions": {"positions": torch.arange(3)[None]},
    "a position too many": {"positions": torch.arange(4)},
    "positions as floats": {"positions": torch.arange(3.0)},
}


@pytest.mark.parametrize("changes", WRONG_MROPE.values(), ids=WRONG_MROPE)
def test_R74_mrope(changes):
    legal = {"positions": torch.arange(3), "query": bf16(3, 128), "key": bf16(3, 64), "cos_sin_cache": bf16(9, 64),
             "head_size": 64}  # fmt: skip
    mrope(**legal)
    with rejects(74):
        mrope(**{**legal, **changes})


def test_float32_turns_in_steps_of_16():
    mrope(torch.arange(3), torch.randn(3, 96), torch.randn(3, 48), torch.randn(9, 48), 48)
    mrope(torch.arange(3).int(), bf16(3, 128), bf16(3, 64), bf16(9, 32), 64)


def test_R74_mrope_positions_lie_inside_the_cache():
    operands = (torch.tensor([0, 9]), bf16(2, 64), bf16(2, 64), bf16(9, 64), 64)
    with rejects(74, "below 9"):
        mrope(*operands)
    with use(strict=False), leaves_undefined(74):
        query, _ = mrope(*operands)
    assert query[1].isnan().all()
    assert query[0].isfinite().all()


def test_R75_rotary_embedding_keeps_its_first_table():
    first, second = torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    at, query = torch.tensor([3, 5]), torch.ones(2, 128).bfloat16()
    want = query.clone()
    rotary(at, want, query.clone(), 64, first, True)
    with rejects(75, "first cache"):
        rotary(at, query.clone(), query.clone(), 64, second, True)
    with rejects(75, "float32"):
        rotary(at, query.clone(), query.clone(), 64, first.float(), True)
    with use(strict=False), leaves_undefined(75):
        got = query.clone()
        rotary(at, got, query.clone(), 64, second, True)
    assert torch.equal(got, want)


def test_R75_rotary_embedding_needs_a_warm_up_with_the_same_count():
    cache, one, two = (
        bf16(8, 64),
        (torch.tensor([1]), bf16(1, 64), bf16(1, 64)),
        (torch.arange(2), bf16(2, 64), bf16(2, 64)),
    )
    with use(capturing=True), rejects(75, "107027"):
        rotary(*one, 64, cache, True)
    rotary(*one, 64, cache, True)
    with use(capturing=True):
        rotary(*one, 64, cache, True)
        with rejects(75, "1 before, 2 now"):
            rotary(*two, 64, cache, True)


def test_R75_rotary_embedding_has_two_dimensions_and_a_position_a_row():
    with rejects(75, "two dimensions"):
        rotary(torch.arange(2), bf16(2, 2, 64), bf16(2, 64), 64, bf16(8, 64), True)
    for query, key in ((bf16(3, 64), bf16(2, 64)), (bf16(2, 64), bf16(1, 64))):
        with rejects(75, "2 positions"):
            rotary(torch.arange(2), query, key, 64, bf16(8, 64), True)


def test_R75_a_call_that_waits_to_be_run_is_no_warm_up():
    operands = torch.tensor([1]), bf16(1, 64), bf16(1, 64), 64, bf16(8, 64), True
    with use(execute=False):
        rotary(*operands)
        with use(capturing=True), rejects(75, "107027"):
            rotary(*operands)


def test_R75_rotary_embedding_writes_contiguous_tensors():
    with rejects(75, "not contiguous"):
        rotary(torch.arange(2), bf16(64, 2).T, bf16(2, 64), 64, bf16(8, 64), True)


def caches(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(*size).bfloat16(), torch.zeros(*size).bfloat16()


def test_R76_reshape_and_cache():
    new, slots = (bf16(2, 2, 16), bf16(2, 2, 16)), torch.tensor([0, 5], dtype=torch.int32)
    key_cache, value_cache = caches(3, 4, 2, 16)
    write(*new, key_cache, value_cache, slots)
    with rejects(76, "int64"):
        write(*new, key_cache, value_cache, slots.long())
    with rejects(76, "not contiguous"):
        write(*new, key_cache.transpose(1, 2), value_cache.transpose(1, 2), slots)
    with use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is key_cache else 2), rejects(76, "one format"):
        write(*new, key_cache, value_cache, slots)
    wild = torch.tensor([3, 12], dtype=torch.int32)
    with rejects(76, "[12]"):
        write(*new, key_cache, value_cache, wild)
    with use(strict=False, findings=[]) as context:
        write(*new, key_cache, value_cache, wild)
    assert [f.rule for f in context.findings] == [76]
    assert torch.equal(key_cache.view(12, 2, 16)[3], new[0][0])
    assert not key_cache.view(12, 2, 16)[[1, 2, 4, 11]].any()


def test_R76_reshape_and_cache_takes_four_dimensions_of_one_dtype():
    new, slots = (bf16(2, 2, 16), bf16(2, 2, 16)), torch.tensor([0, 5], dtype=torch.int32)
    with rejects(76, "[3, 4, 32]"):
        write(*new, *caches(3, 4, 32), slots)
    key_cache, value_cache = caches(3, 4, 2, 16)
    for operands in ((new[0].float(), new[1], key_cache, value_cache), (*new, key_cache, value_cache.float())):
        with rejects(76, "one dtype"):
            write(*operands, slots)


@pytest.mark.parametrize(
    ("size", "slots"), [((2, 32), 2), ((2, 2, 16), 3), ((2, 2, 8), 2)], ids=["two dimensions", "slots", "width"]
)
def test_cache_writes_have_a_slot_a_token_and_whole_rows(size, slots):
    new = torch.zeros(size).bfloat16()
    with pytest.raises(ContractError, match="one slot a token and N \\* D = 32 expected"):
        write(new, new, *caches(3, 4, 2, 16), torch.arange(slots, dtype=torch.int32))
    write(bf16(0, 2, 16), bf16(0, 2, 16), *caches(3, 4, 2, 16), torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize(
    ("key", "value", "cache", "words"),
    [
        ((2, 32), (2, 32), (3, 4, 2, 16), "should be .T, N, D."),
        ((2, 2, 16), (2, 32), (3, 4, 2, 16), "should be .T, N, D."),
        ((2, 2, 16), (3, 2, 16), (3, 4, 2, 16), "should be .T, N, D."),
        ((2, 2, 16), (2, 2, 16), (3, 4, 32), "caches four-dimensional"),
        ((2, 2, 16), (2, 2, 16), (3, 4, 2, 8), "fits key .* neither"),
        ((2, 2, 16), (2, 2, 16), (3, 3, 4, 16), "fits key .* neither"),
    ],
    ids=["two dimensions", "value's rank", "value's rows", "cache rank", "last size", "NZ width"],
)
def test_scatter_fits_a_cache_in_either_format(key, value, cache, words):
    with pytest.raises(ContractError, match=words):
        scatter(bf16(*key), bf16(*value), *caches(*cache), torch.arange(2))
    scatter(bf16(2, 2, 16), bf16(2, 2, 16), *caches(3, 2, 4, 16), torch.arange(2))


def test_R76_scatter_pa_kv_cache():
    new, slots = (bf16(2, 2, 16), bf16(2, 2, 16)), torch.tensor([0, 5])
    scatter(*new, *caches(3, 4, 2, 16), slots)
    with rejects(76, "int16"):
        scatter(*new, *caches(3, 4, 2, 16), slots.short())
    with rejects(76, "float32"):
        scatter(new[0].float(), new[1], *caches(3, 4, 2, 16), slots)
    with rejects(76, "contiguous"):
        scatter(*new, *(c.transpose(1, 2) for c in caches(3, 2, 4, 16)), slots)
    for wild in ([-1, 0], [0, 12], [5, 5]):
        with rejects(76, str(wild[-1] if wild[0] >= 0 else -1)):
            scatter(*new, *caches(3, 4, 2, 16), torch.tensor(wild))


def test_R77_formats_of_expert_weights():
    cast = OPS["npu::npu_format_cast"]
    with rejects(77, "float32"):
        cast(torch.zeros(2, 32, 32), FORMAT_FRACTAL_NZ)
    for size in ((2, 360, 32), (2, 32, 24)):
        with rejects(77, "(16, 16)"):
            cast(torch.zeros(size).bfloat16(), FORMAT_FRACTAL_NZ)
    formats: dict[int, int] = {}
    with use(set_format=lambda t, f: formats.update({id(t): f}), format_of=lambda t: formats.get(id(t), 2)):
        weight = cast(torch.zeros(4, 32, 32).bfloat16(), FORMAT_FRACTAL_NZ)
        assert list(formats.values()) == [FORMAT_FRACTAL_NZ]
        part = weight[1:3]
        formats[id(part)] = FORMAT_FRACTAL_NZ  # as torch_npu reports for a view
        with rejects(77, "view"):
            gmm([bf16(2, 32)], [part], group_list=torch.tensor([1, 1]), split_item=2, group_type=0, group_list_type=1)
        with use(is_whole=lambda t: True):
            gmm([bf16(2, 32)], [part], group_list=torch.tensor([1, 1]), split_item=2, group_type=0, group_list_type=1)
        in_place = OPS["npu::npu_format_cast_.acl_format"]
        with rejects(77, "in place"):
            in_place(torch.zeros(4, 32, 32).bfloat16()[1:], FORMAT_FRACTAL_NZ)
        in_place(torch.zeros(4, 32, 32).bfloat16()[1:], 2)
        in_place(torch.zeros(4, 32, 32).bfloat16(), FORMAT_FRACTAL_NZ)


def test_R77_a_weight_of_another_type_in_nz_is_refused():
    """npu_format_cast refuses float32, but another operator may have made such a tensor."""
    weight = torch.zeros(4, 32, 32)
    groups = {"group_list": torch.tensor([1, 1, 0, 0]), "split_item": 2, "group_type": 0, "group_list_type": 1}
    with use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is weight else 2), rejects(77, "got float32"):
        gmm([torch.zeros(2, 32)], [weight], **groups)
