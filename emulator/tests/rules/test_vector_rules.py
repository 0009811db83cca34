"""R66 to R77: activations, norms, rotary embeddings, cache writes, formats."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.ops.rope import forget_process_state

from emulator.tests.contracts import Broken, broken_calls, check_refusal, leaves_undefined, legal_calls, rejects, under

clipped = OPS["npu::npu_clipped_swiglu"]
swiglu = OPS["npu::npu_swiglu"]
add_norm = OPS["npu::npu_add_rms_norm"]
norm = OPS["npu::npu_rms_norm"]
apply_rope = OPS["npu::npu_apply_rotary_pos_emb"]
rotary_mul = OPS["npu::npu_rotary_mul"]
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


def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


INT32, INT64, FLOAT, DOUBLE = torch.int32, torch.int64, torch.float32, torch.float64
ON_8_5 = {"cann": "8.5"}


def rope(q: tuple[int, ...], table: tuple[int, ...], *options: str) -> partial:
    return partial(apply_rope, bf16(*q), bf16(*q), bf16(*table), bf16(*table), *options)


def heads(dim: int) -> list[torch.Tensor]:
    return [bf16(1, 3, count, dim) for count in (2, 1, 1, 1)]


def turned(x: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...] | None = None) -> partial:
    return partial(rotary_mul, bf16(*x), bf16(*cos), bf16(*(sin or cos)))


def written(key: tuple[int, ...], slots: int) -> partial:
    return partial(write, zeros(*key), zeros(*key), *caches(3, 4, 2, 16), torch.arange(slots, dtype=INT32))


def scattered(key: tuple[int, ...], value: tuple[int, ...], cache: tuple[int, ...]) -> partial:
    return partial(scatter, bf16(*key), bf16(*value), *caches(*cache), torch.arange(2))


def caches(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(*size), zeros(*size)


NARROW = {"head_size": 48, "query": bf16(3, 96), "key": bf16(3, 48)}
BROKEN: Broken = {
    66: {cann: (under(partial(clipped, bf16(2, 4)), cann=cann), "has no attribute 'npu_clipped_swiglu'")
         for cann in ("8.3.rc1", "8.3.rc2")},
    67: {
        what: (under(partial(clipped, x, group_index=groups), **ON_8_5),)
        for what, (x, groups) in {
            "odd": (zeros(2, 3), None),
            "one dimension": (zeros(4), None),
            "strided": (zeros(4, 2).T, None),
            "int32 groups": (zeros(2, 4), zeros(1, dtype=INT32)),
            "two-dimensional groups": (zeros(2, 4), zeros(1, 1, dtype=INT64)),
            "float64": (zeros(2, 4, dtype=DOUBLE), None),
        }.items()
    },
    68: {"halves": (partial(swiglu, bf16(2, 3)), "[2, 3]")},
    70: {
        "gamma float32": (partial(add_norm, bf16(2, 8), bf16(2, 8), torch.ones(8)),),
        "mixed": (partial(add_norm, bf16(2, 8), torch.randn(2, 8), bf16(8)),),
        "shapes": (partial(add_norm, bf16(2, 8), bf16(1, 8), bf16(8)),),
        "empty": (partial(add_norm, bf16(0, 8), bf16(0, 8), bf16(8)),),
        "epsilon": (partial(add_norm, bf16(2, 8), bf16(2, 8), bf16(8), -1e-6),),
        "nine dimensions": (partial(add_norm, bf16(*[1] * 9), bf16(*[1] * 9), bf16(1)),),
        "none": (partial(add_norm, *[torch.ones(()).bfloat16()] * 3),),
    },
    71: {"pairs": (partial(norm, torch.randn(2, 8), bf16(8)), "float32-bfloat16")},
    72: {
        "D 64": (rope((1, 3, 2, 64), (1, 3, 1, 64)),),
        "rank": (rope((3, 2, 128), (3, 1, 128)),),
        "layout": (rope((1, 3, 2, 128), (1, 3, 1, 128), "BNSD"),),
        "cos heads": (rope((1, 3, 2, 128), (1, 3, 2, 128)),),
        "empty": (rope((1, 0, 2, 128), (1, 0, 1, 128)),),
        "D 64 before 8.5": (partial(apply_rope, *heads(64)), "D should be 128"),
        "float32": (partial(apply_rope, *[bf16(1, 3, 2, 128)] * 2, *[torch.randn(1, 3, 1, 128)] * 2), "float32"),
    },
    73: {
        "rank": (turned((3, 2, 64), (3, 1, 64)),),
        "odd": (turned((1, 3, 2, 63), (1, 3, 1, 63)),),
        "wide": (turned((1, 3, 2, 896), (1, 3, 1, 896)),),
        "cos and sin": (turned((1, 3, 2, 64), (1, 3, 1, 64), (1, 1, 2, 64)),),
        "broadcast": (turned((2, 3, 2, 64), (1, 1, 1, 64)),),
        "D": (turned((1, 3, 2, 64), (1, 3, 1, 32)),),
    },
    0: {
        "swiglu float64": (partial(swiglu, zeros(2, 4, dtype=DOUBLE)),
                           "x should be float16, bfloat16 or float32, got float64"),
        **{
            f"{op.__name__} gamma {list(gamma)}": (call, "gamma should have x's trailing dimensions")
            for gamma in ((4,), (1, 8), (2, 8, 1), (1, 2, 8))
            for op, call in (
                (norm, partial(norm, bf16(2, 8), bf16(*gamma))),
                (add_norm, partial(add_norm, bf16(2, 8), bf16(2, 8), bf16(*gamma))),
            )
        },
        "rotary_mul mode": (partial(rotary_mul, *[bf16(1, 3, 2, 64)] * 3, "whole"), "interleave, but got whole"),
        "apply_rotary_pos_emb mode": (partial(apply_rope, *heads(128), "BSH", "whole"), "interleave, but got whole"),
        **{
            f"cache write, {what}": (written(key, slots), "one slot a token and N * D = 32 expected")
            for what, key, slots in (
                ("two dimensions", (2, 32), 2), ("slots", (2, 2, 16), 3), ("width", (2, 2, 8), 2)
            )
        },
        "scatter, two dimensions": (scattered((2, 32), (2, 32), (3, 4, 2, 16)), "should be [T, N, D]"),
        "scatter, value's rank": (scattered((2, 2, 16), (2, 32), (3, 4, 2, 16)), "should be [T, N, D]"),
        "scatter, value's rows": (scattered((2, 2, 16), (3, 2, 16), (3, 4, 2, 16)), "should be [T, N, D]"),
        "scatter, cache rank": (scattered((2, 2, 16), (2, 2, 16), (3, 4, 32)), "caches four-dimensional"),
        "scatter, last size": (scattered((2, 2, 16), (2, 2, 16), (3, 4, 2, 8)), "fits key ", " neither"),
        "scatter, NZ width": (scattered((2, 2, 16), (2, 2, 16), (3, 3, 4, 16)), "fits key ", " neither"),
    },
}  # fmt: skip


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)


LEGAL = {
    "swiglu on rows": partial(swiglu, bf16(2, 3), dim=0),
    "add_norm": partial(add_norm, bf16(8), bf16(8), bf16(8), 0.0),
    "add_norm of eight dimensions": partial(add_norm, bf16(*[1] * 7, 8), bf16(*[1] * 7, 8), bf16(8), 0.0),
    "gamma of two dimensions": partial(norm, bf16(2, 8), bf16(2, 8)),
    "gamma of two dimensions, added": partial(add_norm, bf16(2, 8), bf16(2, 8), bf16(2, 8)),
    "norm by float32": partial(norm, bf16(2, 8), torch.ones(8)),
    "D 64 on 8.5": under(partial(apply_rope, *heads(64)), **ON_8_5),
    **{f"rotary_mul {mode}": partial(rotary_mul, *[bf16(1, 3, 2, 64)] * 3, mode) for mode in ("half", "interleave")},
    **{f"apply_rope {mode}": partial(apply_rope, *heads(128), "BSH", mode) for mode in ("half", "interleave")},
    "cache write of nothing": partial(
        write, zeros(0, 2, 16), zeros(0, 2, 16), *caches(3, 4, 2, 16), zeros(0, dtype=INT32)
    ),
    "scatter to NZ": scattered((2, 2, 16), (2, 2, 16), (3, 2, 4, 16)),
}


@legal_calls(LEGAL)
def test_legal_call_is_taken(run):
    run()


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
