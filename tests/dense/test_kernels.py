"""Every kernel of the dense operations against their definition, and proof that the comparison notices mistakes.

On a CPU the Triton kernels run in Triton's interpreter, in fp32: it does not round to bfloat16 as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from npu_gptoss.dense import reference, small_ops
from npu_gptoss.dense.weights import quantize_rows
from npu_gptoss.kernels import load_kernels
from npu_gptoss.kernels.registry import registry
from tests.dense.cases import Case, make_case
from tests.tolerances import assert_close
from tests.triton import TRITON_HERE

Outputs = Sequence[torch.Tensor]

# Rows of a step and how many of them are real. The matrix-vector kernels take one row.
STEPS = [(1, 1), (3, 3), (5, 2)]


def triton_kernel(name: str) -> Callable:
    """A kernel by its registered name, imported when it is called. The Gluon ones have files of their own."""
    load_kernels()
    spec = registry.kernels[f"dense.{name}"]

    def kernel(**arguments: object) -> object:
        return spec.function(**arguments)

    kernel.__name__ = name
    return kernel


QKV = [small_ops.qkv, *map(triton_kernel, ("qkv.triton", "qkv.triton_gemv", "qkv.triton_skinny"))]
OUTPUT = [small_ops.output, *map(triton_kernel, ("output.triton_gemv", "output.triton_skinny"))]
ROUTER = [small_ops.router, *map(triton_kernel, ("router.triton", "router.triton_norm"))]
ADD_NORM = [small_ops.add_norm, triton_kernel("add_norm.triton")]
LOGITS = [small_ops.logits, *map(triton_kernel, ("logits.triton_gemv", "logits.triton_skinny"))]
GREEDY = [small_ops.greedy, triton_kernel("greedy.triton")]
IN_GLUON = {"dense.qkv.gluon", "dense.output.gluon", "dense.router.gluon"}


def marks_of(kernel: Callable) -> list[pytest.MarkDecorator]:
    return [TRITON_HERE] if "triton" in kernel.__name__ else []


def label(kernel: Callable) -> str:
    return kernel.__name__ if "triton" in kernel.__name__ else f"{kernel.__name__}.small_ops"


def each(kernels: Sequence[Callable]) -> list:
    return [pytest.param(kernel, id=label(kernel), marks=marks_of(kernel)) for kernel in kernels]


def rows_of(kernel: Callable) -> list[tuple[int, int]]:
    return STEPS[:1] if kernel.__name__.endswith("gemv") else STEPS


def run_qkv(kernel: Callable, case: Case, delta: bool = True, **changes: object) -> Outputs:
    keys, values = case.caches()
    arguments = {
        "residual": case.residual,
        "delta": case.delta if delta else None,
        "norm_weight": case.norm,
        "eps": case.eps,
        "weight": case.qkv_weight,
        "bias": case.qkv_bias,
        "cos_sin": case.cos_sin,
        "positions": case.positions,
        "key_cache": keys,
        "value_cache": values,
        "metadata": case.metadata,
        **changes,
    }
    residual, query = kernel(**arguments)
    return residual, query, keys, values


def run_output(kernel: Callable, case: Case, delta: bool = True, **changes: object) -> Outputs:
    arguments = {"attended": case.attended, "weight": case.output_weight, "bias": case.output_bias}
    return (kernel(**{**arguments, "residual": case.residual if delta else None, **changes}),)


def run_router(kernel: Callable, case: Case, delta: bool = True, **changes: object) -> Outputs:
    arguments = {
        "residual": case.residual,
        "delta": case.delta if delta else None,
        "norm_weight": case.norm,
        "eps": case.eps,
        "weight": case.router_weight,
        "bias": case.router_bias,
        "top_k": case.sizes.top_k,
        "live": None,
        **changes,
    }
    return kernel(**arguments)


def run_add_norm(kernel: Callable, case: Case, delta: bool = True, **changes: object) -> Outputs:
    arguments = {"residual": case.residual, "delta": case.delta if delta else None, "norm_weight": case.norm}
    return kernel(**{**arguments, "eps": case.eps, **changes})


def run_logits(kernel: Callable, case: Case, delta: bool = True, **changes: object) -> Outputs:
    out = case.residual.new_full((case.residual.shape[0], case.sizes.vocab), 7.0)
    kernel(**{"normed": case.residual, "weight": case.lm_head, "out": out, **changes})
    return (out,)


FAMILY = [
    *((run_qkv, reference.qkv, kernel) for kernel in QKV),
    *((run_output, reference.output, kernel) for kernel in OUTPUT),
    *((run_router, reference.router, kernel) for kernel in ROUTER),
    *((run_add_norm, reference.add_norm, kernel) for kernel in ADD_NORM),
    *((run_logits, reference.logits, kernel) for kernel in LOGITS),
]
CASES = [
    pytest.param(
        run,
        definition,
        kernel,
        rows,
        real,
        delta,
        id=f"{label(kernel)}-{rows}-{real}-{'sum' if delta else 'plain'}",
        marks=marks_of(kernel),
    )
    for run, definition, kernel in FAMILY
    for rows, real in rows_of(kernel)
    for delta in (True, False)
]


def compare(got: Outputs, want: Outputs) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, torch.float32, scale=4)  # sums of 112 products, in another order


@pytest.mark.parametrize(("run", "definition", "kernel", "rows", "real", "delta"), CASES)
def test_each_kernel_computes_the_definition(
    run: Callable, definition: Callable, kernel: Callable, rows: int, real: int, delta: bool
) -> None:
    case = make_case(rows, real, dtype=torch.float32)
    compare(run(kernel, case, delta), run(definition, case, delta))


def test_every_registered_kernel_is_compared() -> None:
    compared = {f"dense.{kernel.__name__}" for _, _, kernel in FAMILY if "triton" in kernel.__name__}
    registered = {k.name for k in registry.kernels.values() if k.family == "dense" and "triton" in k.name}
    assert registered == compared | {"dense.greedy.triton"}
    assert {k.name for k in registry.kernels.values() if k.family == "dense" and "gluon" in k.name} == IN_GLUON


# Mistakes that a kernel could make: the comparison must notice each


def mistake_in_table(case: Case) -> Case:
    """cos and sin of the two halves of a head's dimensions exchanged."""
    cos, sin = case.cos_sin.chunk(2, -1)
    return replace(case, cos_sin=torch.cat((sin, cos), -1))


def halves_swapped(case: Case) -> Case:
    """RoPE with dimension i paired with i - dim / 2: the sine's sign is the other."""
    cos, sin = case.cos_sin.chunk(2, -1)
    return replace(case, cos_sin=torch.cat((cos, -sin), -1))


def slots_shifted(case: Case) -> Case:
    metadata = replace(case.metadata, slot_mapping=(case.metadata.slot_mapping + 1) % 24)
    return replace(case, metadata=metadata)


MISTAKES: dict[str, tuple[Callable, Callable, Callable[[Case], Case]]] = {
    "norm weight dropped": (run_qkv, reference.qkv, lambda c: replace(c, norm=torch.ones_like(c.norm))),
    "norm weight dropped before the router": (
        run_router,
        reference.router,
        lambda c: replace(c, norm=torch.ones_like(c.norm)),
    ),
    "residual dropped": (run_output, reference.output, lambda c: replace(c, residual=torch.zeros_like(c.residual))),
    "delta dropped": (run_qkv, reference.qkv, lambda c: replace(c, delta=torch.zeros_like(c.delta))),
    "delta twice": (run_add_norm, reference.add_norm, lambda c: replace(c, delta=2 * c.delta)),
    "bias dropped": (run_qkv, reference.qkv, lambda c: replace(c, qkv_bias=torch.zeros_like(c.qkv_bias))),
    "bias twice": (run_output, reference.output, lambda c: replace(c, output_bias=2 * c.output_bias)),
    "router bias dropped": (run_router, reference.router, lambda c: replace(c, router_bias=0 * c.router_bias)),
    "RoPE halves swapped": (run_qkv, reference.qkv, halves_swapped),
    "cosine and sine swapped": (run_qkv, reference.qkv, mistake_in_table),
    "position one too far": (run_qkv, reference.qkv, lambda c: replace(c, positions=c.positions - 1)),
    "wrong slot": (run_qkv, reference.qkv, slots_shifted),
    "no epsilon": (run_add_norm, reference.add_norm, lambda c: replace(c, eps=0.0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str) -> None:
    run, definition, change = MISTAKES[mistake]
    case = make_case(3, dtype=torch.float32)
    if mistake == "no epsilon":
        case = replace(case, residual=case.residual * 1e-3, delta=case.delta * 1e-3)
    compare(run(definition, case), run(definition, case))
    with pytest.raises(AssertionError, match="values differ"):
        compare(run(definition, change(case)), run(definition, case))


# Padding


@pytest.mark.parametrize("kernel", each([*ROUTER, reference.router]))
def test_no_expert_is_read_for_a_padding_row(kernel: Callable) -> None:
    case = make_case(4, 2, dtype=torch.float32)
    live = torch.tensor([9, 1, 0, 0], dtype=torch.int32)
    want = run_router(reference.router, case)
    residual, normed, weights, ids = run_router(kernel, case, live=live)
    compare((residual, normed, weights[:2], ids[:2]), (*want[:2], want[2][:2], want[3][:2]))
    assert ids[2:].tolist() == [[-1] * 4] * 2
    assert weights[2:].abs().max() == 0


@pytest.mark.parametrize("kernel", each(QKV))
def test_padding_rows_write_to_no_slot_of_the_cache(kernel: Callable) -> None:
    rows = rows_of(kernel)[-1][0]
    real = rows - 1
    case = make_case(rows, real, dtype=torch.float32)
    _, _, keys, values = run_qkv(kernel, case)
    for cache in (keys, values):
        written = (cache.flatten(0, 1) != 7.0).any(-1).any(-1).nonzero().flatten()
        assert sorted(written.tolist()) == sorted(case.metadata.slot_mapping.tolist())


@pytest.mark.parametrize("kernel", each(QKV[1:]))
def test_a_negative_slot_is_not_written(kernel: Callable) -> None:
    case = make_case(1, dtype=torch.float32)
    case = replace(case, metadata=replace(case.metadata, slot_mapping=torch.tensor([-1])))
    _, _, keys, values = run_qkv(kernel, case)
    assert (keys == 7.0).all()
    assert (values == 7.0).all()


# Ties and damage


@pytest.mark.parametrize("kernel", each(ROUTER[1:2]))
def test_equal_router_logits_take_the_first_expert_and_each_once(kernel: Callable) -> None:
    case = make_case(2, dtype=torch.float32)
    case = replace(case, router_weight=torch.zeros_like(case.router_weight), router_bias=torch.ones(8))
    _, _, weights, ids = run_router(kernel, case)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def greedy(kernel: Callable, logits: torch.Tensor) -> list[int]:
    out = torch.full((len(logits),), -7)
    kernel(logits=logits, out=out)
    return out.tolist()


@pytest.mark.parametrize("kernel", each([*GREEDY, reference.greedy]))
def test_greedy_takes_the_first_of_the_largest_and_reports_damage(kernel: Callable) -> None:
    """More logits than one program of the Triton kernel takes; the largest in its second part."""
    logits = torch.randn(6, 2500, generator=torch.Generator().manual_seed(1))
    logits[0, [1700, 1900, 2400]] = 9.0
    logits[1, 3] = 9.0
    logits[2, 100], logits[2, 5] = float("nan"), 9.0
    logits[3, 2000] = float("inf")
    logits[4, 2000] = float("-inf")
    logits[5, 2499] = 9.0
    assert greedy(kernel, logits) == [1700, 3, -1, -1, -1, 2499]


@pytest.mark.parametrize("kernel", each(GREEDY))
def test_greedy_fills_a_row_of_a_larger_tensor(kernel: Callable) -> None:
    """A cursor's tokens are a view."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    cursor = torch.full((2, 3), -7)
    kernel(logits=logits, out=cursor[0, :2])
    assert cursor.tolist() == [[*logits.argmax(-1).tolist(), -7], [-7] * 3]


# FP8


@pytest.mark.parametrize(
    ("run", "definition", "kernel", "weight", "rows"),
    [
        pytest.param(run, definition, kernel, weight, rows, id=f"{kernel.__name__}-{rows}", marks=TRITON_HERE)
        for run, definition, kernel, weight, rows in (
            (run_qkv, reference.qkv, QKV[2], "qkv_weight", 1),
            (run_qkv, reference.qkv, QKV[3], "qkv_weight", 5),
            (run_qkv, reference.qkv, QKV[1], "qkv_weight", 5),
            (run_output, reference.output, OUTPUT[1], "output_weight", 1),
            (run_output, reference.output, OUTPUT[2], "output_weight", 5),
            (run_logits, reference.logits, LOGITS[1], "lm_head", 1),
            (run_logits, reference.logits, LOGITS[2], "lm_head", 5),
        )
    ],
)
def test_eight_bit_weights_are_scaled_row_by_row(
    run: Callable, definition: Callable, kernel: Callable, weight: str, rows: int
) -> None:
    case = make_case(rows, dtype=torch.float32)
    matrix = getattr(case, weight) * torch.logspace(-2, 2, getattr(case, weight).shape[0])[:, None]
    scaled = quantize_rows(matrix)
    want = run(definition, case, weight=scaled)
    for mine, theirs in zip(run(kernel, case, weight=scaled), want, strict=True):
        assert_close(mine, theirs, torch.float32, scale=4, atol=1e-4)  # values up to 100


def test_quantized_rows_are_as_near_as_three_bits_of_mantissa_allow() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 40)[:, None]
    scaled = quantize_rows(weight, rows_at_once=7)
    back = scaled.values.float() * scaled.scales[:, None]
    largest = weight.abs().amax(1, keepdim=True)
    assert ((back - weight).abs() <= weight.abs() / 16 + largest * 2**-17).all()


def test_a_row_of_zeros_stays_zero() -> None:
    scaled = quantize_rows(torch.zeros(2, 16))
    assert (scaled.values.float() * scaled.scales[:, None] == 0).all()
