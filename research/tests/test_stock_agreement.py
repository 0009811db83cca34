"""What is told of engines that follow each other, from planned answers; the orders of a child, with a vLLM of paper."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Having
from typing import Any

import pytest
import torch

from research import stock_agreement
from research.agreement import MISTAKES, RAMP
from research.stock_agreement import OURS, STOCK, compare, conclusion, distance, matched

PROMPTS = [[1, 2], [3, 4]]
TRITON, MARLIN = STOCK


class Child:
    """Its tokens; how often each other's are its own choice, from `gaps`."""

    def __init__(self, tokens: list[list[int]], gaps: dict[int, list[float]]) -> None:
        self.tokens, self.gaps, self.mistakes = tokens, gaps, []

    def ask(self, order: dict[str, Any], _: float) -> Any:
        if order["do"] == "generate":
            return self.tokens
        if order["do"] == "logits":
            return torch.save(torch.tensor([[0.0, 1.0, 2.0]]) + self.tokens[0][0], order["path"])
        if order["do"] == "mistake":
            return self.mistakes.append(order["name"])
        if self.mistakes:
            return [1.0, 1.0, 0.0, 0.0] if self.mistakes[-1] != RAMP else [0.0] * 4
        return self.gaps[order["rows"][0]["token_ids"][0]]


def engines() -> dict[str, Child]:
    none = [0.0] * 4
    gaps = {5: none, 6: [0.0, 0.0, 0.0, 0.5], 7: none}
    return {
        OURS: Child([[5, 1], [1, 1]], gaps),
        TRITON: Child([[6, 1], [1, 1]], gaps),
        MARLIN: Child([[7, 1], [1, 1]], gaps),
    }


def test_every_engine_follows_every_engine_and_ours_the_first_of_stock_with_each_mistake(tmp_path):
    children = engines()
    record = compare(children, PROMPTS, {"offline": torch.zeros(1, 3)}, tmp_path)
    same = {(row["engine"], row["follows"]): row["same"] for row in record["followed"]}
    assert len(same) == 9
    assert same[MARLIN, TRITON] == 0.75
    assert children[OURS].mistakes == list(MISTAKES)
    assert {row["follows"] for row in record["mistakes"]} == {TRITON}
    assert record["decoded"][0] == {"engines": [OURS, TRITON], "share": 0.5}
    assert len(record["logits"]) == 6
    assert conclusion(record) == (
        "ours agrees with stock in 0.7500 of the tokens, at least the 0.7500 of stock with itself; "
        "with a mistake in 0.5000 at most"
    )


def test_less_agreement_than_stock_with_itself_is_said(tmp_path):
    children = engines()
    children[OURS].gaps = {5: [0.0] * 4, 6: [1.0, 1.0, 0.0, 0.0], 7: [0.0] * 4}
    assert "0.5000 of the tokens, LESS than the 0.7500" in conclusion(compare(children, PROMPTS, {}, tmp_path))


def test_an_engine_that_did_not_start_leaves_the_others_compared(tmp_path):
    children = engines()
    del children[MARLIN]
    record = compare(children, PROMPTS, {}, tmp_path)
    assert len(record["followed"]) == 4
    assert conclusion(record) == "an engine is missing: nothing to conclude"


def test_a_token_that_no_other_beats_is_the_same_and_the_gap_is_of_the_others():
    assert matched([0.0, 0.0, 0.2, 0.4]) == {"same": 0.5, "mean_gap": 0.3}
    assert matched([0.0]) == {"same": 1.0, "mean_gap": 0.0}


def test_the_distance_of_logits_is_in_deviations():
    first = torch.tensor([[0.0, 2.0, 4.0]])
    assert distance(first, first) == 0.0
    assert distance(first + 1, first) == pytest.approx(0.5)


class Model(torch.nn.Module):
    gptoss = "right"

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


class Paper:
    """What is used of vLLM's LLM."""

    def __init__(self) -> None:
        self.model = Model()
        self.asked: list[dict[str, Any]] = []

    def apply_model(self, change: Any) -> list[Any]:
        return [change(self.model)]

    def generate(self, prompts: list[dict[str, Any]], params: Any, use_tqdm: bool) -> list[Having]:
        self.asked += prompts
        self.model.compute_logits(torch.tensor([[1.0, float(len(self.asked))]]))
        best, other = Having(logprob=-0.1), Having(logprob=-0.5)
        places = [None, {2: best}, {3: best, 9: other}, {9: best, 4: best}]
        return [Having(prompt_logprobs=places, outputs=[Having(token_ids=(8, 9))]) for _ in prompts]


def test_a_child_tells_how_far_each_token_is_from_the_best_and_a_tie_is_none():
    pytest.importorskip("vllm", reason="its SamplingParams")
    rows = [{"prompt_token_ids": [1, 2], "token_ids": [9, 4]}]
    assert stock_agreement.follow(Paper(), rows) == [pytest.approx(0.4), 0.0]


def test_a_child_keeps_the_logits_of_the_last_token_and_leaves_the_model_as_it_was(tmp_path):
    pytest.importorskip("vllm", reason="its SamplingParams")
    paper = Paper()
    stock_agreement.save_logits(paper, PROMPTS, str(tmp_path / "logits"))
    assert torch.load(tmp_path / "logits").tolist() == [[2.0, 2.0], [2.0, 4.0]]
    assert "compute_logits" not in paper.model.__dict__


def test_each_mistake_is_made_in_the_right_model(monkeypatch):
    monkeypatch.setattr(stock_agreement, "with_mistake", lambda model, name: f"{model} but {name}")
    paper = Paper()
    for name in ("one", "two"):
        stock_agreement.make_mistake(paper, name)
    assert paper.model.gptoss == "right but two"


def test_the_command_writes_its_record(tmp_path, monkeypatch, directory):
    children = engines()
    for child in children.values():
        child.hear, child.end = lambda _: "ready", lambda: None
    monkeypatch.setattr(stock_agreement, "start", lambda name, model, folder: children[name])
    monkeypatch.setattr(stock_agreement, "random_prompts", lambda *_: PROMPTS)
    monkeypatch.setattr(stock_agreement, "WITH_LOGITS", 1)
    out = tmp_path / "agreement.json"
    monkeypatch.setattr(stock_agreement, "offline_logits", lambda *_: {"offline": torch.zeros(1, 3)})
    assert stock_agreement.main(["--model", str(directory), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["conclusion"].startswith("ours agrees with stock in 0.75")


def test_the_offline_engine_computes_in_both_dtypes(directory: Path):
    found = stock_agreement.offline_logits(directory, PROMPTS, "cpu")
    exact, rounded = (found[name] for name in (stock_agreement.EXACT, stock_agreement.OFFLINE))
    assert exact.shape == rounded.shape
    assert 0 < distance(rounded, exact) < 0.05
