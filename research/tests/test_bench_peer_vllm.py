"""The peer's script without vLLM: which of its outputs count, what its traces say, and that its files fit ours."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.bench import cases, decode
from npu_gptoss.bench.random_checkpoint import full_config
from research import bench_peer_vllm as script

INPUTS = cases.Inputs(full_config("20b"), torch.device("cpu"), torch.bfloat16)


class Engine:
    """Answers `step` with the numbers of new tokens that were planned for each request."""

    def __init__(self, plan: list[list[int]]) -> None:
        self.plan = list(plan)

    def has_unfinished_requests(self) -> bool:
        return bool(self.plan)

    def step(self) -> list[SimpleNamespace]:
        counts = self.plan.pop(0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in counts]


def peer(plan: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> script.Peer:
    made = script.Peer.__new__(script.Peer)
    made.engine, made.config, made.asked = Engine(plan), {"vocab_size": 100}, []
    made.add = lambda prompts, max_tokens: made.asked.append((len(prompts), max_tokens))
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


def test_a_point_that_is_left_out_is_said(tmp_path, monkeypatch, capsys):
    made = SimpleNamespace(settings={"start_s": 1}, model="20b", config={"vocab_size": 100})
    made.steady_steps = lambda batch, context, steps: [0.001] * steps
    made.document = lambda what, definitions, settings, rows: list(rows)
    made.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None)))
    monkeypatch.setattr(script, "Peer", lambda args, traces: made)
    options = {"tokens": [], "tp": 2, "context": [10], "batch": [1, 8], "most_tokens": 79, "steps": 2, "repeats": 1}
    options |= {"weights": "mxfp4", "greedy": 0, "profile": False, "out": tmp_path}
    script.measure_engine(SimpleNamespace(**options))
    rows = json.loads((tmp_path / "decode.json").read_text())
    assert [(row["batch"], row["layout"]) for row in rows] == [(1, "tp2")]
    assert "batch 8, context 10: left out, more tokens than --most-tokens 79" in capsys.readouterr().out


def test_a_profile_holds_steady_steps_only(monkeypatch):
    made = peer([[1], *[[1, 1]] * (script.WARM_UP_STEPS + 4), [1]], monkeypatch)
    marks = []
    made.llm = SimpleNamespace(
        start_profile=lambda: marks.append(len(made.engine.plan)),
        stop_profile=lambda: marks.append(len(made.engine.plan)),
    )
    made.steady_steps(2, 10, 3, profile=True)
    assert marks == [5, 1], "from after the warm-up to the last step that counts"


def test_a_file_says_whether_our_model_ran_and_at_which_commit(monkeypatch):
    monkeypatch.setattr(script, "version", lambda name: "1")
    monkeypatch.setattr(script, "driver", lambda: "2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setenv("NPU_GPTOSS_COMMIT", "abc")
    stock, ours = (script.document("decode", {}, {}, [], ours=ours) for ours in (False, True))
    assert (stock["engine"], ours["engine"]) == ("vLLM 1", "vLLM 1 with npu_gptoss")
    assert ours["versions"]["commit"] == "abc"
    assert "commit" not in stock["versions"]


def test_the_warm_up_and_the_definitions_are_those_of_our_own_measurement():
    assert script.WARM_UP_STEPS == decode.WARM_UP_STEPS
    assert set(script.DECODE_DEFINITIONS) <= set(decode.DEFINITIONS)


def test_models_are_named_as_ours():
    for (layers, experts), name in script.MODELS.items():
        config = full_config(name)
        assert (config.num_hidden_layers, config.num_local_experts) == (layers, experts)


def test_kernels_are_summed_over_the_traces_that_are_given(tmp_path):
    events = [
        {"cat": "kernel", "name": "gemm", "dur": 4},
        {"cat": "kernel", "name": "gemm", "dur": 6},
        {"cat": "kernel", "name": "norm", "dur": 1},
        {"cat": "cpu_op", "name": "gemm", "dur": 99},
    ]
    with gzip.open(tmp_path / "decode_b32_dp0.1.pt.trace.json.gz", "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    (tmp_path / "prefill_8192.json").write_text(json.dumps({"traceEvents": events * 2}))
    (tmp_path / "decode_b32_totals.txt").write_text("gemm 10 us")
    given = [file for file in (*tmp_path.iterdir(), tmp_path) if "prefill" not in file.name]
    assert script.kernels_of(given) == [
        {"name": "gemm", "calls": 2, "us": 5.0, "total_us": 10.0},
        {"name": "norm", "calls": 1, "us": 1.0, "total_us": 1.0},
    ]


def test_the_experts_time_of_a_layer_is_both_products():
    def kernel(name: str, calls: int, us: float) -> dict[str, object]:
        return {"name": name, "calls": calls, "total_us": calls * us}

    kernels = [kernel("_p_matmul_ogs_a", 48, 100.0), kernel("_matmul_ogs_b", 48, 60.0), kernel("_topk", 48, 5.0)]
    assert script.experts_us(kernels) == 160.0
    assert script.experts_us([kernel("marlin", 48, 100.0)]) is None
    ours = cases.experts_cases(INPUTS, cases.Points([32], formats=["mxfp4"]))
    assert [case.name for case in ours] == ["mxfp4 of 32 tokens=32"]
    assert "experts = f\"{args.weights} of {peer.config['num_local_experts']} tokens=\"" in source()


def source() -> str:
    return Path(script.__file__).read_text()


def test_its_attention_cases_carry_the_names_of_ours():
    """`beside` matches kernels by operation and case."""
    ours = cases.paged_cases(INPUTS, cases.Points([32], contexts=[8192], prompts=[32768]))
    names = {f"decode {kind} ctx=8192 B=32" for kind in ("full", "window")}
    assert {case.name for case in ours} == names | {f"prefill {kind} 32768" for kind in ("full", "window")}
    assert 'f"decode {kind} ctx={context} B={batch}"' in source()
    assert 'f"prefill {kind} {tokens}"' in source()
