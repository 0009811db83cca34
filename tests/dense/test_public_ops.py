"""Refusals and selections of the public dense ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from npu_gptoss import dense
from npu_gptoss.dense.operations import LOGITS, OUTPUT, QKV
from npu_gptoss.kernels import Described, Operation, explain, platform_override
from npu_gptoss.kernels.command import example
from tests.dense.cases import Case, make_case
from tests.refused import refused


@pytest.fixture
def case() -> Case:
    return make_case(3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"norm_weight": torch.ones(112, dtype=torch.bfloat16)}, "norm_weight"),
        ({"delta": torch.zeros(2, 112, dtype=torch.bfloat16)}, "delta"),
        ({"delta": torch.zeros(3, 111)}, "delta"),
        ({"weight": torch.zeros(128, 100, dtype=torch.bfloat16)}, "weight"),
        ({"weight": torch.zeros(128, 112, 1, dtype=torch.bfloat16)}, "weight"),
        ({"bias": torch.zeros(129)}, "bias"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"key_cache": torch.zeros(3, 2, 16)}, "key_cache"),
        ({"value_cache": torch.zeros(5, 4, 2, 16)}, "value_cache"),
        ({"weight": torch.zeros(64, 112), "bias": torch.zeros(64)}, "weight"),
        ({"weight": torch.zeros(135, 112), "bias": torch.zeros(135)}, "weight"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions"),
    ],
)
def test_qkv_refuses_shapes_that_do_not_fit(case: Case, changes: dict[str, object], field: str) -> None:
    with refused(field):
        case.run("qkv", dense.qkv, **changes)


def test_other_operations_refuse_shapes_that_do_not_fit(case: Case) -> None:
    for residual in (case.residual[:2], case.residual[:, :5]):
        with refused("residual"):
            dense.output(case.attended, case.output_weight, case.output_bias, residual)
    router = (case.residual, None, case.norm, 1e-5, case.router_weight, case.router_bias)
    for top_k in (0, 9):
        with refused("top_k"):
            dense.router(*router, top_k)
    with refused("live"):
        dense.router(*router, 4, live=torch.ones(2))
    with refused("out"):
        dense.logits(case.delta, case.lm_head, out=torch.empty(3, 300))
    for out in (torch.empty(300, 3, dtype=torch.bfloat16).T, torch.empty(3, 600, dtype=torch.bfloat16)[:, ::2]):
        with refused("out"):
            dense.logits(case.delta, case.lm_head, out=out)
    for wrong in (torch.zeros(3), torch.zeros(3, 0)):
        with refused("logits"):
            dense.greedy(wrong)
    with refused("out"):
        dense.greedy(torch.zeros(3, 4), out=torch.zeros(3))


def test_kernel_is_chosen_by_the_arguments_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for one dtype would read another as garbage; one for a single row leaves out the rest."""
    asked = []

    def ask(operation: Operation, kernel: None, size: int, describe: Callable[[int], Described]) -> Callable:
        call, traits = describe(size)
        asked.append((operation.name, str(call), dict(traits)))
        return lambda **arguments: ()

    monkeypatch.setattr(dense, "chosen", ask)
    experts = {"experts": 8, "hidden_size": 112, "aligned": True}
    for case, rows in ((make_case(3), 3), (make_case(1), 1)):
        asked.clear()
        other = {"rows": rows, "aligned": True}
        wide = torch.zeros(6, 4, 2, 16)
        case.run("qkv", dense.qkv, weight=case.qkv_weight.float(), key_cache=wide, value_cache=wide)
        dense.output(case.attended, case.output_weight.float(), case.output_bias)
        dense.router(case.residual, None, case.norm, 1e-5, case.router_weight, case.router_bias, 4)
        dense.add_norm(case.residual, None, case.norm, 1e-5, torch.bfloat16)
        dense.logits(case.delta, case.lm_head.float())
        dense.greedy(torch.zeros(3, 4))
        assert asked == [
            ("dense.qkv", "hidden float32, kv float32, weight float32", {**other, "head_dim": 16}),
            ("dense.output", "hidden bfloat16, weight float32", other),
            ("dense.router", "hidden bfloat16, weight bfloat16", {"rows": rows, "logits": 8 * rows, **experts}),
            ("dense.add_norm", "hidden bfloat16", {}),
            ("dense.logits", "hidden bfloat16, weight float32", other),
            ("dense.greedy", "logits float32", {}),
        ]


def test_a_row_without_a_slot_is_stored_nowhere_by_the_definition(case: Case) -> None:
    """-1 counts from the end, so it would look like the last slot of the cache."""
    keys, values = case.caches()
    slots = case.metadata.slot_mapping.clone()
    slots[1] = -1
    metadata = dataclasses.replace(case.metadata, slot_mapping=slots)
    case.run("qkv", dense.qkv, key_cache=keys, value_cache=values, metadata=metadata, kernel="reference")
    written = (keys.flatten(0, 1) != 7).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(slots[[0, 2]].tolist())


@pytest.mark.parametrize("kernel", ["reference", "small_ops"])
def test_slots_after_the_real_rows_are_never_written(kernel: str) -> None:
    """A graph's mapping has an entry for each row of the bucket; entries of padding are left over from earlier
    steps."""
    case = make_case(4, 2)
    keys, values = case.caches()
    real = case.metadata.slot_mapping
    free = [slot for slot in range(24) if slot not in real.tolist()][:2]
    metadata = dataclasses.replace(case.metadata, slot_mapping=torch.cat((real, torch.tensor(free))))
    case.run("qkv", dense.qkv, key_cache=keys, value_cache=values, metadata=metadata, kernel=kernel)
    for cache in (keys, values):
        written = (cache.flatten(0, 1) != 7).flatten(1).any(1).nonzero().flatten().tolist()
        assert sorted(written) == sorted(real.tolist())


def test_nothing_to_add_gives_the_residual_itself(case: Case) -> None:
    """No copy: decode has none to spare."""
    assert dense.add_norm(case.residual, None, case.norm, 1e-5, torch.bfloat16)[0] is case.residual


@pytest.mark.parametrize("first", [True, False])
def test_residual_stays_float32_and_inputs_are_rounded_once(first: bool) -> None:
    """first: the stream is the embedding, in bf16."""
    case = make_case(3, first=first)
    hidden = case.residual.float() + case.delta.float()
    normed = (case.norm * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5))).to(torch.bfloat16)
    got = dense.add_norm(case.residual, case.delta, case.norm, 1e-5, torch.bfloat16)
    assert torch.equal(got[0], hidden)
    assert torch.equal(got[1], normed)
    product = torch.nn.functional.linear(case.attended, case.output_weight, case.output_bias)
    got = dense.output(case.attended, case.output_weight, case.output_bias, case.residual)
    assert torch.equal(got, case.residual.float() + product)


@pytest.mark.parametrize(
    ("platform", "rows", "selected"),
    [
        ("cuda", 1, "dense.qkv.triton_gemv"),
        ("cuda", 2, "dense.qkv.triton"),
        ("cpu", 1, "dense.qkv.small_ops"),
        ("ascend", 300, "dense.qkv.small_ops"),
    ],
)
def test_bf16_selects_the_expected_kernels(platform: str, rows: int, selected: str) -> None:
    with platform_override(platform, frozenset({"triton"})):
        assert explain(QKV, *example(QKV, rows=rows)).selected.name == selected


def test_without_triton_a_gpu_computes_with_small_ops() -> None:
    with platform_override("cuda", frozenset()):
        explanation = explain(LOGITS, *example(LOGITS))
    assert explanation.selected.name == "dense.logits.small_ops"
    assert any("needs triton, which is not installed" in line for line in explanation.lines())


def test_a_layer_that_is_built_asks_no_more(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dense.bound(OUTPUT, case.attended.dtype, case.output_weight)
    want = dense.output(case.attended, case.output_weight, case.output_bias)
    monkeypatch.setattr("npu_gptoss.kernels.selection.select_kernel", None)
    assert torch.equal(dense.output(case.attended, case.output_weight, case.output_bias, kernel=kernel), want)
