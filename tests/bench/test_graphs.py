"""Graphs against eager steps. A CPU has none: an object stands in for them that leaves every step to the eager path."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.bench import graphs
from npu_gptoss.bench.session import Running
from npu_gptoss.cli import main
from npu_gptoss.engine import Engine
from npu_gptoss.errors import InputError


class NoGraphs:
    mode = "full"

    def takes(self, chunks: object) -> bool:
        return False


def running(engine: Engine) -> Running:
    return Running(SimpleNamespace(steps=3), engine, torch.device("cpu"), "bf16", ceilings=[])


def test_tokens_count_as_identical_up_to_the_first_difference() -> None:
    assert graphs.identical([1, 2, 3], [1, 2, 3]) == 3
    assert graphs.identical([1, 2, 3], [1, 9, 3]) == 1
    assert graphs.identical([], [1]) == 0


def test_graphs_are_compared_with_eager_steps_and_put_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    put = NoGraphs()
    monkeypatch.setattr(engine, "graphs", put)
    record = graphs.measure(running(engine), 2, 20)
    assert engine.graphs is put
    assert record["graphs"] == "full"
    assert record["tokens_compared"] == record["tokens_identical"] == 6
    assert record["ratio"] == pytest.approx(record["eager_tpot_ms"] / record["tpot_ms"], rel=1e-3)


def test_an_engine_without_graphs_has_nothing_to_compare(engine: Engine) -> None:
    with pytest.raises(InputError, match="--graphs"):
        graphs.measure(running(engine), 1, 20)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; make test-cuda runs it on one")
def test_real_graphs_give_the_tokens_of_eager_steps(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "graphs.json"
    options = ("--device", "cuda", "--num-blocks", "40", "--context", "20", "--steps", "8", "--json", str(file))
    assert main(["bench", "graphs", "--model", str(directory), *options]) == 0
    content = json.loads(file.read_text())
    assert content["records"][0]["tokens_identical"] == content["records"][0]["tokens_compared"] == 8
