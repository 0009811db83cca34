"""Which steps count, what is predicted from them, and that a child which fails costs the others nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from research import verify_cost
from research.verify_cost import WARM_UP_STEPS, predicted, steady

ROW = {"engine": "ours", "batch": 8, "drafts": 0, "step_ms": 4.0}


class Engine:
    """Answers `step` with the planned numbers of new tokens; its clock goes on by one at each."""

    def __init__(self, plan: list[list[int]], replayed: list[int], rows: int) -> None:
        self.plan, self.replayed, self.rows, self.asked = list(plan), replayed, rows, 0

    def add_request(self, *_: object) -> None:
        self.asked += 1

    def has_unfinished_requests(self) -> bool:
        return bool(self.plan)

    def step(self) -> list[SimpleNamespace]:
        self.replayed.append(self.rows)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in self.plan.pop(0)]


def test_steps_in_which_every_request_has_a_token_count_and_accepted_drafts_are_told(monkeypatch):
    pytest.importorskip("vllm", reason="its SamplingParams")
    clock = iter(range(1000))
    monkeypatch.setattr(verify_cost.time, "perf_counter", lambda: float(next(clock)))
    replayed: list[int] = []
    plan = [[1], [1, 0], *[[1, 1]] * (WARM_UP_STEPS + 1), [2, 1], [1, 1], [1, 1], [1]]
    engine = Engine(plan, replayed, rows=8)
    found = steady(engine, 100, 2, 2, 3, replayed)
    assert engine.asked == 2
    assert found == {"step_ms": 1000.0, "step_median_ms": 1000.0, "tokens_a_step": 1.25, "whole_graphs": 1.0}


def test_too_few_steady_steps_are_an_error():
    pytest.importorskip("vllm", reason="its SamplingParams")
    with pytest.raises(RuntimeError, match="no 9 steady steps in a row at batch 2, 3 drafts"):
        steady(Engine([[1, 1]] * 10, [], 8), 100, 2, 9, 3, [])


def test_without_the_head_only_tokens_are_proposed_and_vllm_s_marks_are_not_kept(monkeypatch):
    """A -1 in an embedding is an assertion on the device: the measurement died of it."""

    class TargetDependentARSpeculator:
        draft_tokens = torch.tensor([[5, 6], [-1, -1], [7, 8]])

        def propose(self, input_batch: object, *_: object) -> torch.Tensor:
            raise AssertionError("the head ran")

    name = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
    module = ModuleType(name)
    module.TargetDependentARSpeculator = TargetDependentARSpeculator
    monkeypatch.setitem(sys.modules, name, module)
    head = TargetDependentARSpeculator()
    with verify_cost.without_head():
        proposed = head.propose(SimpleNamespace(num_reqs=2))
        assert proposed.tolist() == [[5, 6], [0, 0]]
        proposed[:, :] = -1
    assert head.draft_tokens.tolist() == [[5, 6], [-1, -1], [7, 8]]


def test_published_acceptance_over_a_measured_step_is_the_predicted_speed():
    plain, verifying = predicted([ROW, ROW | {"drafts": 5, "step_ms": 8.0}])
    assert "predicted_tokens_per_s" not in plain
    assert verifying["relative"] == 2.0
    assert verifying["predicted_tokens_per_s"] == [2680.0, 3550.0]  # 8 requests, 2.68 and 3.55 tokens in 8 ms
    assert verifying["predicted_speedup"] == [1.34, 1.775]


def test_without_a_plain_step_no_speedup_is_claimed():
    (row,) = predicted([ROW | {"drafts": 5}])
    assert "relative" not in row
    assert "predicted_speedup" not in row


class Child:
    """Of which one never gets ready."""

    def __init__(self, drafts: int) -> None:
        self.drafts, self.ended = drafts, False

    def hear(self, _: float) -> str:
        if self.drafts == 3:
            raise RuntimeError("3 drafts: no answer")
        return "ready"

    def ask(self, question: dict[str, int], _: float) -> dict[str, float]:
        return {"step_ms": 1.0 + self.drafts + question["batch"]}

    def end(self) -> None:
        self.ended = True


def test_a_child_that_fails_is_said_and_the_others_are_measured_and_ended(tmp_path, monkeypatch, capsys):
    children = {}
    monkeypatch.setattr(verify_cost, "start", lambda args, engine, k, logs: children.setdefault(k, Child(k)))
    out = tmp_path / "cost.json"
    args = argparse.Namespace(
        model=Path("m"), head=Path("h"), out=out, engines=["ours"], drafts=[0, 3, 5], batch=[1, 8], steps=4
    )
    rows = verify_cost.measure(args)
    assert [(row["drafts"], row["batch"]) for row in rows] == [(0, 1), (0, 8), (5, 1), (5, 8)]
    assert json.loads(out.read_text())["records"] == rows
    assert "3 drafts: no answer" in capsys.readouterr().err
    assert all(child.ended for child in children.values())
