"""Right projections and norms pass; few rows, an Inf that spreads and rows that are written too early are seen."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.ops import OPS

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import platform_override
from npu_gptoss.selftest import dense
from npu_gptoss.selftest.experts import Sizes
from npu_gptoss.selftest.outcome import LIMIT
from npu_gptoss.serving.ascend import start_check
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPES = dense.shapes(hidden=96, heads=8, kv_heads=2, head_dim=64, experts=8)


def products(repeats=2):
    return [*dense.projections(dense.CASES, SHAPES, CPU, BF16, repeats)]


def normed(width=96, repeats=2):
    return [*dense.norms(dense.NORM_ROWS[False], width, CPU, BF16, repeats)]


def wrong(found):
    return [outcome.what for outcome in found if outcome.problem]


@pytest.fixture
def spoil(monkeypatch):
    """Replaces torch's linear by one that gets its right result, and x, to change."""

    def change(bad):
        right = torch.nn.functional.linear
        # the definition is computed in fp32 by the same function
        monkeypatch.setattr(
            torch.nn.functional,
            "linear",
            lambda x, w, b=None: bad(right(x, w, b), x) if x.dtype == BF16 else right(x, w, b),
        )

    return change


@pytest.mark.parametrize("platform", [ascend_ops.ascend, lambda: platform_override("cpu", frozenset())])
def test_right_kernels_pass_with_room_to_spare(platform):
    with platform():
        found = [*products(), *normed(), *normed(2880)]
    assert wrong(found) == []
    assert max(outcome.deviation for outcome in found) < LIMIT / 2


def test_the_shapes_are_those_of_the_rank():
    assert dense.shapes(2880, 16, 2, 64, 32) == {"qkv_proj": (2880, 1280), "o_proj": (1024, 2880), "router": (2880, 32)}


def test_few_rows_that_lose_columns_are_seen(spoil):
    def loses_columns(out, x):
        if len(x) < 64:
            out[:, -1:] = 0
        return out

    spoil(loses_columns)
    with ascend_ops.ascend():
        assert {what.partition(",")[0].rpartition("[")[2] for what in wrong(products())} == {"1", "16", "63"}


def test_an_inf_that_reaches_another_row_is_seen_and_its_own_row_is_not_judged(spoil):
    def spreads(out, x):
        infinite = x.isinf().any(1)
        out[infinite] = float("nan")
        return out

    spoil(spreads)
    with ascend_ops.ascend():
        assert wrong(products()) == []

    def to_the_next_row(out, x):
        infinite = x.isinf().any(1).roll(1)
        out[infinite] = float("nan")
        return out

    spoil(to_the_next_row)
    with ascend_ops.ascend():
        assert wrong(products()) == [
            f"{name} [{rows}, {inputs}] to {outputs} with an Inf"
            for name, (inputs, outputs) in SHAPES.items()
            for rows in (63, 257)
        ]


def test_products_that_change_from_call_to_call_are_seen(spoil):
    calls = [0]

    def other_bits(out, x):
        calls[0] += 1
        return out if calls[0] % 2 else out * 1.005

    spoil(other_bits)
    with ascend_ops.ascend():
        assert wrong(products(repeats=1)) == []
        assert len(wrong(products(repeats=2))) == len(SHAPES) * len(dense.CASES)


def test_a_norm_that_is_written_too_early_is_seen_where_rows_are_merged():
    with ascend_ops.ascend(defects=frozenset({"narrow-norm"})):
        assert wrong(normed()) == [f"add_rms_norm [{rows}, 96]" for rows in (40, 41, 257)]
        assert wrong(normed(2880)) == []
        assert "cf84e2226" in normed()[2].suspect


def test_a_sum_that_is_lost_is_seen(monkeypatch):
    right = OPS["npu::npu_add_rms_norm"]
    monkeypatch.setitem(OPS, "npu::npu_add_rms_norm", lambda x, residual, *rest: (*right(x, residual, *rest)[:2], x))
    with ascend_ops.ascend():
        assert {what.partition(" ")[0] for what in wrong(normed())} == {"add_rms_norm"}


def test_a_wrong_product_ends_the_start_without_a_way_out_that_does_not_exist(spoil):
    sizes = Sizes(96, 64, 8, (0, 8))
    spoil(lambda out, x: out * (1.1 if len(x) == 16 else 1))
    start_check.around.cache_clear()
    with ascend_ops.ascend(), pytest.raises(InputError, match="projections or norms compute wrong") as caught:
        start_check.around(sizes, 8, 2, BF16, CPU)
    assert "NPU_GPTOSS_KERNEL" not in str(caught.value)
    assert "[16, 96]" in str(caught.value)
