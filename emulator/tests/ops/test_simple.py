"""The small operators around attention and experts against plain formulas, and their refusals."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import ContractError

from tests.tolerances import assert_close

MATMUL_ADD = OPS["atb::_npu_matmul_add_fp32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matmul_add_fp32_adds_the_transposed_product_to_c(dtype):
    """x is stored as [k, m]. Nothing is rounded to 16 bits, as C sums many small products."""
    x, weight = torch.randn(300, 5).to(dtype), torch.randn(300, 7).to(dtype)
    before = torch.randn(5, 7)
    C = before.clone()
    assert MATMUL_ADD(x, weight, C) is None
    assert_close(C, (before.double() + x.double().t() @ weight.double()).float(), scale=4)
    assert not torch.allclose(C, before + (x.t() @ weight).float(), rtol=1e-4, atol=1e-4)
    MATMUL_ADD(x, weight, C)
    assert_close(C, (before.double() + 2 * (x.double().t() @ weight.double())).float(), scale=4)


def test_matmul_add_fp32_without_execution_only_checks():
    C = torch.ones(2, 2)
    with use(execute=False):
        MATMUL_ADD(torch.ones(3, 2).bfloat16(), torch.ones(3, 2).bfloat16(), C)
    assert (C == 1).all()


@pytest.mark.parametrize(
    ("x", "weight", "C"),
    [
        (torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 2)),
        (torch.ones(3, 2).half(), torch.ones(3, 2).bfloat16(), torch.ones(2, 2)),
        (torch.ones(3, 2).half(), torch.ones(3, 2).half(), torch.ones(2, 2).half()),
        (torch.ones(2, 3).half(), torch.ones(3, 2).half(), torch.ones(2, 2)),
        (torch.ones(3, 2).half(), torch.ones(3, 4).half(), torch.ones(4, 2)),
        (torch.ones(3, 2, 1).half(), torch.ones(3, 2).half(), torch.ones(2, 2)),
        (torch.ones(2, 2).half(), torch.ones(3, 2).half(), torch.ones(2, 2)),
    ],
    ids=["float32", "two types", "a sum of 16 bits", "x not transposed", "a sum transposed", "a batch", "another k"],
)
def test_matmul_add_fp32_refuses(x, weight, C):
    with pytest.raises(ContractError, match=r"should be 16-bit \[k, m\] and \[k, n\], C float32 \[m, n\]"):
        MATMUL_ADD(x, weight, C)


def test_prefetch_of_nothing_is_refused():
    OPS["npu::npu_prefetch"](torch.ones(2), None, 8)
    for size, offset in ((0, 0), (8, -1)):
        with pytest.raises(ContractError, match=f"max_size {size} and offset {offset} are wrong"):
            OPS["npu::npu_prefetch"](torch.ones(2), None, size, offset)


@pytest.mark.parametrize(
    ("p", "k"),
    [
        (torch.ones(2).bfloat16(), None),
        (torch.ones(1), None),
        (None, torch.ones(2, dtype=torch.int64)),
        (None, torch.ones(2, 1, dtype=torch.int32)),
    ],
    ids=["p's dtype", "p for one of two", "k in 64 bits", "k's rank"],
)
def test_top_k_top_p_refuses(p, k):
    logits = torch.randn(2, 8)
    op = OPS["npu::npu_top_k_top_p"]
    op(logits, torch.ones(2), torch.ones(2, dtype=torch.int32))
    with pytest.raises(ContractError, match=r"should be torch\.\w+ \[2\]"):
        op(logits, p, k)


def test_histc_counts_integers():
    """vllm-ascend counts each expert's tokens with it; the last bin includes its upper end."""
    ids = torch.tensor([0, 3, 3, 1, 4], dtype=torch.int32)
    counted = OPS["aten::histc"](ids, bins=4, min=0, max=4)
    assert counted.dtype == torch.int32
    assert counted.tolist() == [1, 1, 0, 3]
