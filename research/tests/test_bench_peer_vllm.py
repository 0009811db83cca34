"""bench_peer_vllm without vLLM: the steps that count, and records that fit those of `npu-gptoss bench`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from npu_gptoss.bench import decode, prefill
from research import bench_peer_vllm as script


class Engine:
    """Answers `step` with the planned numbers of new tokens for each request."""

    def __init__(self, plan: list[list[int]]) -> None:
        self.plan = list(plan)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.plan)

    def step(self) -> list[SimpleNamespace]:
        counts = self.plan.pop(0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]


def peer(plan: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> script.Peer:
    made = script.Peer.__new__(script.Peer)
    made.engine, made.vocabulary, made.model, made.ours = Engine(plan), 100, "20b", False
    made.settings = {"start_s": 1}
    made.add = lambda prompts, max_tokens: None
    clock = iter(range(1000))
    monkeypatch.setattr(script.time, "perf_counter", lambda: float(next(clock)))
    return made


def test_only_steps_that_bring_every_request_one_token_count(monkeypatch):
    start = [[1], [1, 1, 1], [1, 2], []]  # a prompt alone, too many, two tokens at once, nothing
    steady = [[1, 1]] * (script.WARM_UP_STEPS + 4)
    found = peer([*start, *steady, [1, 1], [1]], monkeypatch).steady_steps(2, 10, 3)
    assert found == [1.0, 1.0, 1.0]


def test_a_gap_in_the_steady_steps_starts_them_again(monkeypatch):
    few = [[1, 1]] * (script.WARM_UP_STEPS + 2)
    with pytest.raises(RuntimeError, match="no 3 steady steps in a row at batch 2, context 10"):
        peer([*few, [1], *few], monkeypatch).steady_steps(2, 10, 3)


def test_records_are_written_and_points_left_out_are_named(tmp_path, monkeypatch, capsys):
    made = peer([], monkeypatch)
    made.steady_steps = lambda batch, context, steps: [0.001] * steps
    made.first_token = lambda prompt: len(prompt) / 100
    monkeypatch.setattr(script, "Peer", lambda args: made)
    monkeypatch.setattr(script, "MOST_TOKENS", 79)
    monkeypatch.setattr(script, "document", lambda what, definitions, settings, rows, ours: list(rows))
    options = ["--tp", "2", "--context", "10", "--batch", "1", "8", "--tokens", "20", "--repeats", "1"]
    script.main(["--model", "m", "--out", str(tmp_path), *options])
    rows = {what: json.loads((tmp_path / f"{what}.json").read_text()) for what in ("decode", "prefill")}
    assert [(row["batch"], row["layout"], row["tpot_ms"]) for row in rows["decode"]] == [(1, "tp2", 1.0)]
    assert [(row["prompt_tokens"], row["prefill_s"]) for row in rows["prefill"]] == [(20, 0.2)]
    assert "batch 8, context 10: left out, more than 79 tokens" in capsys.readouterr().out


def test_a_file_says_whether_our_model_ran_and_at_which_commit(monkeypatch):
    monkeypatch.setattr(script, "version", lambda name: "1")
    monkeypatch.setattr(script, "machine", lambda device: {"device": "GPU"})
    monkeypatch.setenv("NPU_GPTOSS_COMMIT", "abc")
    stock, ours = (script.document("decode", {}, {}, [], ours=ours) for ours in (False, True))
    assert (stock["engine"], ours["engine"]) == ("vLLM 1", "vLLM 1 with npu_gptoss")
    assert ours["versions"]["commit"] == "abc"
    assert "commit" not in stock["versions"]


def test_records_define_numbers_of_our_own_records():
    for what, own in (("decode", decode.KIND), ("prefill", prefill.KIND)):
        assert set(script.DEFINITIONS[what]) <= set(own.definitions)
