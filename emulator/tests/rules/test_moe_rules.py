"""R57 to R59, R61 and R65: routing, dispatch and combine."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ascend_emulator.context import Group, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import NotEmulatedError

from emulator.tests.contracts import (
    Broken,
    broken_calls,
    check_refusal,
    leaves_undefined,
    legal_calls,
    notes,
    of,
    rejects,
)

softmax = OPS["npu::npu_moe_gating_top_k_softmax"]
softmax_v2 = OPS["npu::npu_moe_gating_top_k_softmax_v2"]
gating = OPS["npu::npu_moe_gating_top_k"]
init_v2 = OPS["npu::npu_moe_init_routing_v2"]
permute = OPS["npu::npu_moe_token_permute"]
unpermute = OPS["npu::npu_moe_token_unpermute"]

LOGITS = torch.randn(5, 8)
IDS = torch.tensor([[0, 2], [1, 2], [3, 0]], dtype=torch.int32)
ROWS = torch.randn(3, 32).bfloat16()


PLACES = torch.arange(6, dtype=torch.int32)
FLOAT_ROWS, PROBS = torch.randn(6, 32), torch.rand(3, 2)


def gated(x: torch.Tensor = LOGITS, **options: object) -> partial:
    return partial(gating, x, **{"k": 2, **options})


def routing_v2(**changes: object) -> dict:
    return {
        "x": ROWS, "expert_idx": IDS, "active_num": 6, "expert_num": 4, "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True, "quant_mode": -1, "active_expert_range": [0, 4], **changes,
    }  # fmt: skip


def unpermuted(rows: torch.Tensor = FLOAT_ROWS, **changes: object) -> partial:
    return partial(unpermute, rows, **{"sorted_indices": PLACES, "probs": PROBS, **changes})


def named(changes: dict[str, object]) -> str:
    shown = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


BROKEN: Broken = {
    57: {
        **{
            f"{version}, {what}": (partial(op, x, k=k),)
            for version, op in (("v1", softmax), ("v2", softmax_v2))
            for what, x, k in (
                ("k > E", LOGITS, 9), ("one dimension", LOGITS[0], 2), ("integers", LOGITS.long(), 2),
                ("k > 1024", torch.zeros(1, 1100), 1025),
            )
        },
        "v2, an empty choice": (partial(softmax_v2, LOGITS, k=0),),
        "v2, a third order": (partial(softmax_v2, LOGITS, k=2, renorm=2),),
    },
    58: {
        "rank": (gated(LOGITS[None]),),
        "experts": (gated(torch.zeros(1, 2049)),),
        "bias": (gated(bias=torch.zeros(7)),),
        "renorm": (gated(renorm=1),),
        "bias dtype": (gated(bias=torch.zeros(8).bfloat16()),),
        "groups": (gated(group_count=3),),
        "no group": (gated(group_count=0),),
        "more groups than there are": (gated(group_count=2, k_group=3),),
        "none of the groups": (gated(k_group=0),),
        "k": (gated(k=9),),
        "k of one group of two": (gated(k=5, group_count=2),),
        "k = 0": (gated(k=0),),
        "norm": (gated(norm_type=2),),
        "selection": (gated(group_select_mode=2),),
        "integers": (gated(LOGITS.long()),),
    },
    59: {
        named(changes): (of(init_v2, routing_v2, **changes),)
        for changes in (
            {"active_expert_range": []}, {"active_expert_range": [2, 2]}, {"active_expert_range": [0, 5]},
            {"expert_num": 0}, {"expert_num": 10241}, {"expert_num": 5121, "expert_tokens_num_type": 2},
            {"drop_pad_mode": 1}, {"expert_tokens_num_flag": False}, {"expert_tokens_num_type": 0},
            {"quant_mode": 0}, {"active_num": 3}, {"row_idx_type": 2},
            {"expert_idx": IDS.long()}, {"expert_idx": IDS.flatten()}, {"expert_idx": IDS[..., None]},
            {"x": ROWS[:2]}, {"x": ROWS[..., None]}, {"x": ROWS.double()}, {"x": ROWS.to(torch.int8), "quant_mode": 1},
        )
    },
    61: {
        "padded": (partial(permute, ROWS, IDS, padded_mode=True),),
        "513 of a token": (partial(permute, ROWS, torch.zeros(3, 513, dtype=torch.int32)),),
        "rows": (partial(permute, ROWS, IDS[:2]),),
        "floats": (partial(permute, ROWS, IDS.float()),),
        "three dimensions": (partial(permute, ROWS, IDS[..., None]),),
        **{
            f"unpermute {named(changes)}": (unpermuted(**changes),)
            for changes in (
                {"padded_mode": True}, {"probs": torch.rand(3, 3)}, {"probs": torch.rand(6)},
                {"sorted_indices": PLACES.long()}, {"sorted_indices": PLACES[None]}, {"probs": PROBS.double()},
                {"sorted_indices": torch.zeros(513, dtype=torch.int32), "probs": torch.rand(1, 513)},
            )
        },
        "unpermute, rank": (unpermuted(FLOAT_ROWS[..., None]), "permuted_tokens"),
        "unpermute, float64": (unpermuted(FLOAT_ROWS.double()), "permuted_tokens"),
    },
    0: {
        **{
            f"finished, {what}, {version}": (partial(op, LOGITS, finished=finished, k=2), "finished should be bool [5]")
            for version, op in (("v1", softmax), ("v2", softmax_v2))
            for what, finished in (("float", torch.zeros(5)), ("rows", torch.zeros(4, dtype=torch.bool)))
        },
        "permute, rank": (partial(permute, ROWS[:, 0], IDS), "float with two dimensions or more"),
        "permute, float64": (partial(permute, ROWS.double(), IDS), "float with two dimensions or more"),
    },
}  # fmt: skip


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)


LEGAL = {
    "softmax of three dimensions": partial(softmax, LOGITS[None], k=8),
    "softmax, 1024": partial(softmax, torch.zeros(1, 1100), k=1024),
    "finished": partial(softmax, LOGITS, torch.zeros(5, dtype=torch.bool), k=2),
    "gating": gated(k=8, bias=torch.zeros(8)),
    "gating, 2048": gated(torch.zeros(1, 2048)),
    "init_routing_v2": of(init_v2, routing_v2, active_num=-1),
    "init_routing_v2, 10240": of(init_v2, routing_v2, expert_num=10240),
    "init_routing_v2, 5120": of(init_v2, routing_v2, expert_num=5120, expert_tokens_num_type=2),
    "permute": partial(permute, ROWS, IDS),
    "permute, 512": partial(permute, ROWS, torch.zeros(3, 512, dtype=torch.int32)),
    "unpermute": unpermuted(),
    "unpermute, 512": unpermuted(sorted_indices=torch.zeros(512, dtype=torch.int32), probs=torch.rand(1, 512)),
}


@legal_calls(LEGAL)
def test_legal_call_is_taken(run):
    run()


def test_limits_have_results():
    assert softmax(LOGITS, k=0)[0].shape == (5, 0)
    rows, *_ = init_v2(**routing_v2(x=ROWS.to(torch.int8)))
    assert rows.dtype == torch.int8, "quantised already"


@pytest.mark.parametrize(
    ("rule", "op"), [(57, softmax), (57, softmax_v2), (58, lambda x, k: gating(x, k, norm_type=1))]
)
def test_nan_logits_leave_the_choice_undefined(rule, op):
    x = LOGITS.clone()
    x[1, 3] = float("nan")
    with rejects(rule, "1 of", "NaN"):
        op(x, k=2)
    with use(strict=False), leaves_undefined(rule):
        _, ids, _ = op(x, k=2)
    assert (ids[1] < 0).all()
    assert (torch.cat([ids[:1], ids[2:]]) >= 0).all()
    with use(execute=False):
        op(x, k=2)


@pytest.mark.parametrize("wild", [-1, (1 << 24) - 1])
def test_R61_indices_have_24_bits(wild):
    """The device sorts larger indices wrongly and silently."""
    permute(ROWS, torch.tensor([0, 1, (1 << 24) - 2]))
    broken = torch.tensor([0, wild, 2])
    with rejects(61, str(wild)):
        permute(ROWS, broken)
    with use(strict=False), leaves_undefined(61):
        permuted, _ = permute(ROWS, broken)
    assert permuted.isnan().all()


@pytest.mark.parametrize("wild", [-1, 6])
def test_R61_places_lie_inside_the_rows(wild):
    rows, places, probs = torch.randn(6, 4), torch.arange(6, dtype=torch.int32), torch.rand(3, 2)
    places[3] = wild
    with rejects(61, str(wild)):
        unpermute(rows, places, probs)
    with use(strict=False), leaves_undefined(61):
        out = unpermute(rows, places, probs)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def across(name: str, rows=4, hidden=2880, choices=4, scales=torch.float32, **extra):
    """Calls dispatch or combine as one of 16 ranks of 128 experts."""
    ids = torch.zeros(rows, choices, dtype=torch.int32)
    group = {"group_ep": "ep", "ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 128, **extra}
    x, weights = torch.zeros(rows, hidden).bfloat16(), torch.zeros(rows, choices, dtype=scales)
    if "dispatch" in name:
        return OPS[f"npu::npu_moe_distribute_{name}"](x, ids, expert_scales=weights, **group)
    counts = torch.zeros(16, dtype=torch.int32)
    return OPS[f"npu::npu_moe_distribute_{name}"](x, ids, counts, counts, weights, **group)


KINDS = ("dispatch_v2", "combine_v2", "dispatch", "combine")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rows": 257}, "256"),
        ({"rows": 0}, "1 to 256"),
        ({"hidden": 7200}, "7168"),
        ({"hidden": 2890}, "32"),
        ({"choices": 17}, "16"),
        ({"moe_expert_num": 400}, "24"),
        ({"moe_expert_num": 520}, "512"),
        ({"moe_expert_num": 127}, "shared out evenly"),
        ({"ep_rank_id": 16}, "epRankId"),
        ({"shared_expert_rank_num": 1}, "shared"),
        ({"expert_shard_type": 1}, "shared"),
        ({"group_tp": "tp"}, "TP domain"),
        ({"tp_world_size": 2}, "TP domain"),
        ({"scales": torch.bfloat16}, "float32"),
        ({"global_bs": 60}, "globalBs"),
        ({"x_active_mask": torch.ones(3, dtype=torch.bool)}, "4 rows"),
        ({"x_active_mask": torch.ones(4, dtype=torch.bool), "global_bs": 128}, "unequal rows"),
    ],
    ids=lambda c: next(iter(c)) if isinstance(c, dict) else None,
)
def test_R65_dispatch_and_combine_across_ranks(changes, word):
    for kind in KINDS:
        with rejects(65, word):
            across(kind, **changes)
        for legal in ({}, {"rows": 256, "hidden": 7168, "choices": 16, "moe_expert_num": 384}):
            with pytest.raises(NotEmulatedError):
                across(kind, **legal)
    for kind in KINDS[:2]:
        with pytest.raises(NotEmulatedError):  # no limit of experts on a rank
            across(kind, moe_expert_num=512, comm_alg="hierarchy", hidden=10240)
    x, ids = torch.zeros(4, 2880).bfloat16(), torch.zeros(4, 4, dtype=torch.int32)
    with pytest.raises(NotEmulatedError):  # dispatch may go without scales
        OPS["npu::npu_moe_distribute_dispatch_v2"](x, ids, "ep", 16, 0, 128)


@pytest.mark.parametrize(
    ("cann", "card", "more", "taken", "refused"),
    [
        ("8.3.rc1", "A2", {}, (16, 256), (1, 2, 12, 264)),
        ("8.5", "A2", {}, (16,), (4, 384)),
        ("9.1", "A2", {}, (1, 2, 8, 16, 384), (12, 392)),
        ("9.1", "A2", {"comm_alg": "hierarchy", "rows": 512}, (16, 64), (72, 384)),
        ("8.3.rc1", "A3", {"rows": 512}, (2, 3, 768), (1, 769)),
        ("9.1", "A3", {"rows": 512}, (2, 16, 768), (1, 776)),
    ],
)
def test_R65_each_card_and_release_takes_its_own_ranks(cann, card, more, taken, refused):
    with use(cann=cann, card=card):
        for kind in KINDS[:2]:
            for ranks in taken:
                with pytest.raises(NotEmulatedError):
                    across(kind, **{"ep_world_size": ranks, "moe_expert_num": ranks, **more})
            for ranks in refused:
                with rejects(65, "epWorldSize", f"got {ranks} on an {card}"):
                    across(kind, **{"ep_world_size": ranks, "moe_expert_num": ranks, **more})


def test_R65_an_a3_takes_no_narrow_rows_and_more_of_the_rest():
    with use(card="A3"):
        for hidden in (1000, 8224):
            with rejects(65, "1024 to 8192"):
                across("dispatch_v2", hidden=hidden)
        for legal in ({"hidden": 8000}, {"moe_expert_num": 1024}, {"group_tp": "tp", "tp_world_size": 1}):
            with pytest.raises(NotEmulatedError):
                across("dispatch_v2", **legal)


@pytest.mark.parametrize(
    ("ranks", "more", "documented"), [(8, {}, "16 to 256"), (24, {"comm_alg": "hierarchy"}, "16, 32 or 64")]
)
def test_R65_the_tiling_takes_undocumented_rank_counts(ranks, more, documented):
    with notes(65, documented, f"the tiling takes {ranks}"), pytest.raises(NotEmulatedError):
        across("dispatch_v2", ep_world_size=ranks, moe_expert_num=5 * ranks, **more)


def machine_of(ranks: int, window: int):
    """A group of which this is rank 0; nobody else is there."""
    return lambda name: Group(ranks, 0, window << 20, lambda what, tensor: [tensor] * ranks) if name == "ep" else None


def test_R65_the_group_is_the_one_that_is_named():
    with use(card="A3", execute=False, group=machine_of(16, 200)):
        across("dispatch_v2")
        for wrong in ({"group_ep": "pe"}, {"ep_world_size": 8}, {"ep_rank_id": 1}):
            with rejects(65):
                across("dispatch_v2", **wrong)


# of gpt-oss-120b by eight ranks of 256 rows on an A3 396 MiB, which its error rounds up; by sixteen on an A2 184
@pytest.mark.parametrize(("cann", "by"), [("8.3.rc1", "variable"), ("9.1", "group")])
def test_R94_the_buffer_holds_what_dispatch_may_send(cann, by, monkeypatch):
    def call(megabytes: int, ranks: int, **more):
        monkeypatch.setenv("HCCL_BUFFSIZE", str(megabytes if by == "variable" else 1))
        with use(cann=cann, execute=False, group=machine_of(ranks, megabytes if by == "group" else 1), **more):
            return across("dispatch_v2", rows=256, ep_world_size=ranks)

    with rejects(94, "HCCL_BUFFSIZE is too SMALL", "NEEDED_HCCL_BUFFSIZE = 397MB, HCCL_BUFFSIZE=395MB"):
        call(395, 8, card="A3")
    assert call(396, 8, card="A3")[0].shape == (256 * 8 * 4, 2880)
    with rejects(94):  # an A2 raises nothing and writes past the end
        call(183, 16)
    with use(strict=False), leaves_undefined(94):
        call(183, 16, strict=False)
    call(184, 16)
