"""Right kernels pass, and an operator that is wrong at an edge fails the case of that edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ascend_emulator.ops import OPS

from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import ascend as ascend_experts
from npu_gptoss.moe import expert_mlp, prepare_experts
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.experts import CASES, Layer, group_lists, results_of, routing
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
WHOLE = Rank(CPU, BF16, 1, hidden=96, inner=64, experts=8, held=(0, 8))
PART = replace(WHOLE, held=(2, 4))
ROUTING, MATMUL, UNPERMUTE, SWIGLU = (
    f"npu::npu_{name}" for name in ("moe_init_routing_v2", "grouped_matmul", "moe_token_unpermute", "swiglu")
)
RIGHT = dict(OPS)


def seen(cases=CASES, repeats=1):
    """(case, tokens) of each wrong result, on a rank with all experts and on one with two of them."""
    found = [
        result
        for part, rank in ((False, WHOLE), (True, PART))
        for result in results_of([case for case in cases if case.of_part is part], replace(rank, repeats=repeats))
    ]
    return {result.call.removeprefix("experts, ") for result in found if result.wrong}


def named(*names):
    return [case for case in CASES if case.name in names]


@pytest.fixture
def spoil(monkeypatch):
    """Replaces an operator by one that gets its right results, and the call's arguments, to change."""

    def change(name, wrong):
        right = OPS[name]
        monkeypatch.setitem(OPS, name, lambda *args, **kwargs: wrong(right(*args, **kwargs), args, kwargs))

    return change


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5"])
def test_right_operators_pass_with_room_to_spare(cann):
    with ascend_ops.ascend(cann):
        for sizes, part in ((WHOLE, False), (PART, True)):
            found = results_of([case for case in CASES if case.of_part is part], replace(sizes, repeats=2))
            assert [result for result in found if result.wrong or result.error > 0.5] == []
        assert [found for found in (*routing(WHOLE), *group_lists(WHOLE)) if found.wrong] == []


@pytest.mark.parametrize("sizes", [WHOLE, PART])
def test_expected_results_are_those_of_the_definition(sizes):
    """Rolled columns and one product must be the same function as `reference` with this rank's weights."""
    generator = torch.Generator().manual_seed(0)
    layer = Layer.random(replace(sizes, dtype=torch.float32))
    hidden = torch.randn(9, sizes.hidden, generator=generator)
    ids = torch.rand(9, sizes.experts, generator=generator).topk(4).indices
    weights = torch.rand(9, 4, generator=generator).softmax(-1)
    with platform_override("cpu"):
        definition = expert_mlp(hidden, prepare_experts(layer.weights(), kernel="reference"), weights, ids)
    assert torch.allclose(layer.want(hidden, weights, ids), definition, atol=1e-5)


def test_stale_counts_fail_a_rank_with_a_part_only():
    with ascend_ops.ascend(defects=frozenset({"stale-counts"})):
        assert seen(named("few tokens")) == set()
        assert seen(named("a part of the experts")) == {"a part of the experts, 17 tokens"}


def test_results_that_are_not_written_fail(monkeypatch):
    monkeypatch.setattr(ascend_experts, "finite_first_row", lambda rows: None)
    with ascend_ops.ascend():
        assert seen(named("tokens of other ranks only")) == {
            "tokens of other ranks only, 1 tokens",
            "tokens of other ranks only, 64 tokens",
        }


def skips_empty_groups(results, args, kwargs):
    counts = kwargs["group_list"]
    if bool((counts > 0).all()):
        return results
    return RIGHT[MATMUL](**{**kwargs, "group_list": torch.cat([counts[counts > 0], counts[counts == 0]])})


def loses_row_128(results, args, kwargs):
    if int(kwargs["group_list"].max()) > 128:
        results[0][128] = 0
    return results


def swaps_the_last_above_one_core(results, args, kwargs):
    rows, places, *rest = results
    if len(places) > 6080:
        places[-1], places[-2] = places[-2].clone(), places[-1].clone()
    return rows, places, *rest


def loses_the_last_token(out, args, kwargs):
    if len(out) >= 4096:
        out[-1] = 0
    return out


def loses_columns(out, args, kwargs):
    if out.shape[1] == 1440:
        out[:, -8:] = 0
    return out


SORT = "sort on one core and on many"
WIDE = [f"activation {columns} wide" for columns in (2880, 1440, 720)]


@pytest.mark.parametrize(
    ("operator", "wrong", "right_cases", "seen_by"),
    [
        (
            MATMUL,
            skips_empty_groups,
            ["all to the first expert"],
            ["every second expert, 17", "all to the last expert, 17"],
        ),
        (MATMUL, loses_row_128, [], ["edges of a tile, 129"]),
        (ROUTING, swaps_the_last_above_one_core, [], [f"{SORT}, 2049", f"{SORT}, 4096"]),
        (UNPERMUTE, loses_the_last_token, ["few tokens"], [f"{SORT}, 4096", "sort backwards, 16384"]),
        (SWIGLU, loses_columns, [WIDE[0], WIDE[2]], [f"{WIDE[1]}, {tokens}" for tokens in (1, 17, 1100)]),
    ],
)
def test_operator_that_is_wrong_at_an_edge_fails_the_calls_of_that_edge(spoil, operator, wrong, right_cases, seen_by):
    spoil(operator, wrong)
    with ascend_ops.ascend():
        found = seen(named(*right_cases, *(call.rpartition(", ")[0] for call in seen_by)))
    assert found == {f"{call} tokens" for call in seen_by}


def test_results_that_change_between_calls_fail(spoil):
    calls = [0]

    def another_bit(out, args, kwargs):
        calls[0] += 1
        return out if calls[0] % 2 else out * 1.005

    spoil(UNPERMUTE, another_bit)
    with ascend_ops.ascend():
        assert seen(named("every second expert"), repeats=1) == set()
        assert seen(named("every second expert"), repeats=2) == {"every second expert, 17 tokens"}


def test_ends_taken_for_counts_fail(spoil):
    def ignores_the_kind(results, args, kwargs):
        if kwargs["group_list_type"] == 1:
            return results
        counts = kwargs["group_list"].diff(prepend=torch.zeros(1, dtype=torch.int64))
        return RIGHT[MATMUL](**{**kwargs, "group_list_type": 1, "group_list": counts.flip(0)})

    spoil(MATMUL, ignores_the_kind)
    with ascend_ops.ascend():
        assert [found.lines for found in group_lists(WHOLE)] == [("ends gave other bits than counts",)]


@pytest.mark.parametrize(
    ("wrong", "phrase"),
    [
        (lambda weights, ids: (weights, ids.flip(1)), "logits["),
        (lambda weights, ids: (weights, ids[:, :1].expand_as(ids)), "logits["),
        (lambda weights, ids: (weights, ids - 1), "logits["),
        (lambda weights, ids: (weights * 0.99, ids), "from the definition"),
        (lambda weights, ids: (weights.fill_(float("nan")), ids), "NaN or Inf"),
    ],
)
def test_wrong_choice_and_wrong_weights_of_experts_fail(wrong, phrase, monkeypatch):
    from npu_gptoss.verify.self_test import experts

    right = experts.route
    monkeypatch.setattr(experts, "route", lambda logits, k: wrong(*right(logits, k)))
    with platform_override("cpu", frozenset()):
        found = [str(result.lines) for result in routing(WHOLE)]
    assert len(found) == 4
    assert all(phrase in words for words in found), found
