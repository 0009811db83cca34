"""Kernels of the dense operations: by verify's calls in Triton's interpreter, and what these calls do not show.

tests/verify/test_mistakes.py has the kernels in plain torch, and the mistakes. The interpreter computes in fp32: it
does not round to bfloat16 as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from npu_gptoss.dense import reference, small_ops
from npu_gptoss.kernels import load_kernels, platform_override
from npu_gptoss.kernels.registry import registry
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.runner import Target, verify
from tests.attention.cases import in_one_tensor
from tests.dense.cases import Case, make_case
from tests.triton import TRITON_HERE

load_kernels()
IN_TRITON = sorted(k.name for k in registry.kernels.values() if k.family == "dense" and k.solution == "triton")


def triton_kernel(name: str) -> Callable:
    """A kernel by its registered name, imported when it is called. Gluon kernels have separate files."""
    spec = registry.kernels[f"dense.{name}"]

    def kernel(**arguments: object) -> object:
        return spec.function(**arguments)

    kernel.__name__ = name
    return kernel


QKV = [small_ops.qkv, *map(triton_kernel, ("qkv.triton", "qkv.triton_gemv"))]
ROUTER = [small_ops.router, *map(triton_kernel, ("router.triton", "router.triton_norm"))]
ADD_NORM = [small_ops.add_norm, triton_kernel("add_norm.triton")]
GREEDY = [small_ops.greedy, triton_kernel("greedy.triton")]


def marks_of(kernel: Callable) -> list[pytest.MarkDecorator]:
    return [TRITON_HERE] if "triton" in kernel.__name__ else []


def label(kernel: Callable) -> str:
    return kernel.__name__ if "triton" in kernel.__name__ else f"{kernel.__name__}.small_ops"


def each(kernels: Sequence[Callable]) -> list:
    return [pytest.param(kernel, id=label(kernel), marks=marks_of(kernel)) for kernel in kernels]


@TRITON_HERE
@pytest.mark.parametrize("name", IN_TRITON)
def test_each_kernel_passes_the_short_calls_of_verify(name: str) -> None:
    kernel = registry.kernels[name]
    check = CHECKS[f"{kernel.family}.{kernel.mode}"]
    short = replace(check, calls=lambda spec: check.calls(replace(spec, thorough=False)))
    with platform_override("cuda", frozenset({"triton"})):
        report = verify(Target(name, short, kernel), torch.device("cpu"), seed=0, cases=0)
    assert report.ok, [call for call in report.calls if call.wrong][:3]


def assert_that_nan_chooses_experts_that_are_there(kernel: Callable, case: Case, experts: int) -> None:
    """An id behind the last expert is read from memory that is none: on a GPU the process ends, if it is lucky."""
    right = case.run("router", kernel)
    case.residual[1] = torch.nan
    *_, weights, ids = case.run("router", kernel)
    assert ids.min() >= 0
    assert ids.max() < experts
    assert weights[1].isnan().all(), "the damage is hidden"
    for mine, theirs in ((weights, right[2]), (ids, right[3])):
        assert torch.equal(mine[[0, 2]], theirs[[0, 2]])


@pytest.mark.parametrize("kernel", each(ROUTER))
def test_a_row_of_nan_chooses_experts_that_are_there(kernel: Callable) -> None:
    assert_that_nan_chooses_experts_that_are_there(kernel, make_case(3, dtype=torch.float32), 8)


def assert_that_one_tensor_for_keys_and_values_gets_the_same_bits(kernel: Callable, case: Case) -> None:
    keys, values = in_one_tensor(*case.caches())
    for mine, theirs in zip(
        case.run("qkv", kernel, key_cache=keys, value_cache=values), case.run("qkv", kernel), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kernel", each(QKV))
def test_values_beside_keys_in_one_tensor_are_written_exactly(kernel: Callable) -> None:
    assert_that_one_tensor_for_keys_and_values_gets_the_same_bits(kernel, make_case(1, dtype=torch.float32))


@pytest.mark.parametrize("kernel", each(QKV[1:]))
def test_a_negative_slot_is_not_written(kernel: Callable) -> None:
    case = make_case(1, dtype=torch.float32)
    case = replace(case, metadata=replace(case.metadata, slot_mapping=torch.tensor([-1])))
    _, _, keys, values = case.run("qkv", kernel)
    assert (keys == 7.0).all()
    assert (values == 7.0).all()


# Ties and damage


@pytest.mark.parametrize("kernel", each(ROUTER[1:2]))
def test_equal_router_logits_take_the_first_expert_and_each_once(kernel: Callable) -> None:
    case = make_case(2, dtype=torch.float32)
    case = replace(case, router_weight=torch.zeros_like(case.router_weight), router_bias=torch.ones(8))
    _, _, weights, ids = case.run("router", kernel)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def greedy(kernel: Callable, logits: torch.Tensor) -> list[int]:
    out = torch.full((len(logits),), -7)
    kernel(logits=logits, out=out)
    return out.tolist()


@pytest.mark.parametrize("kernel", each([*GREEDY, reference.greedy]))
def test_greedy_takes_the_first_of_the_largest_and_reports_damage(kernel: Callable) -> None:
    """More logits than one program of the Triton kernel takes; the largest in its second part."""
    logits = torch.randn(7, 2500, generator=torch.Generator().manual_seed(1))
    logits[0, [1700, 1900, 2400]] = 9.0
    logits[1, 3] = 9.0
    logits[2, 100], logits[2, 5] = float("nan"), 9.0
    logits[3, 2000] = float("inf")
    logits[4] = float("-inf")
    logits[5, 2499] = 9.0
    logits[6, :2200] = logits[6, 2201:] = float("-inf")  # one token is allowed
    assert greedy(kernel, logits) == [1700, 3, -1, -1, -1, 2499, 2200]


@pytest.mark.parametrize("kernel", each(GREEDY))
def test_greedy_fills_a_row_of_a_larger_tensor(kernel: Callable) -> None:
    """A cursor's tokens are a view."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    cursor = torch.full((2, 3), -7)
    kernel(logits=logits, out=cursor[0, :2])
    assert cursor.tolist() == [[*logits.argmax(-1).tolist(), -7], [-7] * 3]
