"""Counts the launches, copies, waits and bytes of our layer on the emulated 910B in a decode step.

A step of four layers minus a step of two is two layers, one with the window and one without, so the runner's own work
around the layers drops out. docs/performance.md quotes these counts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.launch import Machine

from emulator.tests.test_triton import PACKAGES, needs_compiler
from npu_gptoss.bench import roofline
from npu_gptoss.model.config import GptOssConfig
from tests.checkpoints import new_checkpoint
from tests.serving.emulated.conftest import asking, importing
from tests.serving.emulated.rounds import EAGER, VOCABULARY, prompts

SHAPE = {"hidden": 512, "intermediate": 512, "experts": 32, "heads": 8, "kv_heads": 2, "vocab_size": VOCABULARY}
CONTEXT = 200  # beyond the window
FEWER, MORE = 3, 7  # tokens of an answer
BF16 = {"dtype": "bfloat16", "enable_prefix_caching": False}
OPERATIONS = ("ATTENTION_PAGED", "ATTENTION_WRITE_KV", "MOE_ROUTE", "MOE_EXPERTS")
SMALL_OPS = {f"NPU_GPTOSS_KERNEL_{operation}": "small_ops" for operation in OPERATIONS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {layers: new_checkpoint(tmp_path_factory, layers=layers, **SHAPE) for layers in (2, 4)}


@pytest.fixture(scope="module", params=[("8.3.rc1", None)])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    trace, (cann, triton) = tmp_path_factory.mktemp("trace") / "trace.jsonl", request.param
    with importing(Machine(cann, trace=trace, triton=triton)) as process:
        yield process, trace


def counted(lines: list[str]) -> list[Counter[str]]:
    """Of each round of a trace. A blocking copy is one wait, with its synchronisation or without."""
    rounds: list[Counter[str]] = [Counter()]
    previous = ""
    for event in map(json.loads, lines):
        kind, found = event["event"], rounds[-1]
        if kind == "op" and event["phase"] not in ("capture", "update"):
            found["launches"] += event["launches"]
            found["bytes"] += event["read"] + event["written"]
        elif kind == "copy":
            found[event["kind"]] += 1
            found["waits"] += event["sync"] and previous != "sync"
        elif kind == "sync":
            found["waits"] += 1
        elif kind == "graph" and event["what"] == "replay":
            found["replays"] += 1
        elif kind == "mark" and event["name"] == "round":
            rounds.append(Counter())
        previous = kind
    return rounds[1:]


def steps_of_two_layers(traced: Any, models: Any, folder: Path, *batches: int, **how: Any) -> list[dict[str, float]]:
    """Counts of an average decode step of so many requests."""
    process, trace = traced
    rounds = [
        {"prompts": prompts((CONTEXT,) * batch), "tokens": tokens} for batch in batches for tokens in (FEWER, MORE)
    ]
    totals: list[Counter[str]] = [Counter() for _ in batches]
    for sign, layers in ((-1, 2), (1, 4)):
        before = trace.stat().st_size if trace.exists() else 0
        asking(process, models[layers], folder)(rounds, **how)
        with trace.open() as stream:
            stream.seek(before)
            found = counted(stream.readlines())
        for total, fewer, more in zip(totals, found[::2], found[1::2], strict=True):
            for name in fewer | more:
                total[name] += sign * (more[name] - fewer[name])
    return [{name: count / (MORE - FEWER) for name, count in total.items()} for total in totals]


NO_WAIT = {"h2d": 0, "d2h": 0, "waits": 0}


@pytest.fixture(scope="module")
def eager(traced: Any, models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Counts by batch."""
    found = steps_of_two_layers(traced, models, tmp_path_factory.mktemp("eager"), 1, 8, options=EAGER | BF16)
    return dict(zip((1, 8), found, strict=True))


@pytest.mark.parametrize(("batch", "launches"), [(1, 22), (8, 25)])
def test_our_layer_neither_waits_nor_copies_and_launches_few(batch, launches, eager):
    assert {name: eager[batch].get(name, 0) for name in NO_WAIT} == NO_WAIT
    assert eager[batch]["launches"] == 2 * launches


def test_our_layer_moves_the_rooflines_bytes(eager, models):
    """At batch 1 the router selects four experts."""
    config = GptOssConfig.from_directory(models[2])
    lengths = range(CONTEXT + FEWER, CONTEXT + MORE)
    keys = sum(lengths) / len(lengths) + config.sliding_window
    weights = roofline.attention_parameters(config) + roofline.router_parameters(config)
    experts = config.num_experts_per_tok * roofline.expert_bytes(config, "bf16")
    needed = 2 * (2 * weights + experts) + keys * roofline.kv_bytes_per_token(config)
    assert 1 < eager[1]["bytes"] / needed < 1.05


ON_9_1 = {"async_scheduling": False}  # vLLM 0.23 would schedule a step ahead of its tokens


@pytest.mark.parametrize(
    ("traced", "batch", "launches"),
    [
        pytest.param(("9.1", PACKAGES), 8, 13, marks=[pytest.mark.ascend_compiler, needs_compiler]),
        pytest.param(("9.1", None), 8, 19, marks=pytest.mark.long),  # as no card is
    ],
    indirect=["traced"],
)
def test_our_layer_neither_waits_nor_copies_on_9_1(traced, batch, launches, models, tmp_path):
    (found,) = steps_of_two_layers(traced, models, tmp_path, batch, options=EAGER | BF16 | ON_9_1)
    assert {name: found.get(name, 0) for name in NO_WAIT} == NO_WAIT
    assert found["launches"] == 2 * launches


def test_between_captured_graphs_ours_neither_waits_nor_copies(traced, models, tmp_path):
    """Three requests in a bucket of four: the padded row costs one launch more, which zeroes the tail."""
    four = {"compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4]}}
    (found,) = steps_of_two_layers(traced, models, tmp_path, 3, options=BF16 | four)
    assert {name: found.get(name, 0) for name in NO_WAIT} == NO_WAIT
    assert found["replays"] == 2


def test_the_counts_show_the_cost_of_small_operators(traced, models, tmp_path):
    """Their experts read the rows of each expert on the host, twice a layer."""
    (found,) = steps_of_two_layers(traced, models, tmp_path, 1, options=EAGER | BF16, variables=SMALL_OPS)
    assert found["waits"] == 2 * 3
    assert found["d2h"] == 2 * 2
    assert found["launches"] > 2 * 70
