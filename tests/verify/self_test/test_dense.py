"""Right projections and norms pass; lost columns, an Inf that spreads and rows written too early fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ascend_emulator.ops import OPS

from npu_gptoss.kernels import platform_override
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test import dense
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
RANK = Rank(CPU, BF16, 2, hidden=96, inner=64, experts=8, held=(0, 8), heads=8, kv_heads=2)
SHAPES = dense.shapes(RANK)


def products():
    return [*dense.projections(dense.CASES, RANK)]


def normed(width=96):
    return [*dense.norms(dense.NORM_ROWS, width, RANK)]


def wrong(found):
    return [result.call for result in found if result.wrong]


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
    assert max(result.error for result in found) < 0.5


@pytest.mark.parametrize(
    ("rows_on", "seen_by"),
    [(0, []), (1, [f"{n} [{rows}, {i}] to {o} with an Inf" for n, (i, o) in SHAPES.items() for rows in (63, 257)])],
)
def test_inf_that_reaches_another_row_fails_and_its_own_row_does_not(spoil, rows_on, seen_by):
    def spreads(out, x):
        out[x.isinf().any(1).roll(rows_on)] = float("nan")
        return out

    spoil(spreads)
    with ascend_ops.ascend():
        assert wrong(products()) == seen_by


def test_norm_written_too_early_fails_where_rows_are_merged():
    with ascend_ops.ascend(defects=frozenset({"narrow-norm"})):
        assert wrong(normed()) == [f"add_rms_norm [{rows}, 96]" for rows in (40, 41, 257)]
        assert wrong(normed(2880)) == []
        assert "cf84e2226" in normed()[2].suspect


def test_lost_sum_of_the_residual_fails(monkeypatch):
    right = OPS["npu::npu_add_rms_norm"]
    monkeypatch.setitem(OPS, "npu::npu_add_rms_norm", lambda x, residual, *rest: (*right(x, residual, *rest)[:2], x))
    with ascend_ops.ascend():
        assert {what.partition(" ")[0] for what in wrong(normed())} == {"add_rms_norm"}


@pytest.mark.parametrize(
    "change",
    [{}, {"positions": lambda t: t - 1}, {"slot_mapping": lambda t: t.clamp(min=1)}],
    ids=["right", "position", "slot"],
)
def test_a_wrong_position_and_a_written_padding_slot_are_seen(change, monkeypatch):
    """As a compiler other than the one that `verify --compile` asks could make of the kernel."""

    def run(inputs, kernel=None):
        if kernel is None:
            metadata = inputs["metadata"]
            slots = change.get("slot_mapping", lambda t: t)(metadata.slot_mapping)
            positions = change.get("positions", lambda t: t)(inputs["positions"])
            inputs = {**inputs, "positions": positions, "metadata": replace(metadata, slot_mapping=slots)}
        return right(inputs, kernel)

    right = dense._rotated
    monkeypatch.setattr(dense, "_rotated", run)
    with platform_override("cpu", frozenset()):
        found = [*dense.rotation(RANK)]
    assert len(wrong(found)) == (len(found) if change else 0)
