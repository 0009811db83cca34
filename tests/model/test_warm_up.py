"""No step compiles a program that the warm-up did not, by Triton's own keys of launches that nothing launches; and the
warm-up changes nothing.

The model has the published sizes on torch's `meta` device. Kernels are chosen as on a Hopper GPU, with Gluon or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.kernels import Platform, platform_override
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.warm_up import Reach, warm_up
from tests.checkpoints import random_config, random_tensors
from tests.markdown import ROOT
from tests.triton import TRITON_HERE

pytest.importorskip("triton")

REACHES = {
    "graphs": {"rows": 8192, "decode_rows": 1024, "keys": 131072, "graph_rows": 512},
    "eager": {"rows": 2048, "decode_rows": 300, "keys": 2000},
    "small": {"rows": 13, "decode_rows": 5, "keys": 40, "graph_rows": 2},
}


def question(reach: str, **changes: Any) -> dict[str, Any]:
    return {"experts": 32, "gluon": False, "ranks": 1, "reach": REACHES[reach], **changes}


QUESTIONS = {
    **{f"{reach}, Gluon": question(reach, gluon=True) for reach in REACHES},
    **{reach: question(reach) for reach in REACHES},
    "120b": question("eager", gluon=True, experts=128),
    "two ranks": question("eager", gluon=True, ranks=2),
}


def answers_of(*arguments: str, **environment: str) -> list[Any]:
    """Of a process that interprets no kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.programs", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def missing() -> dict[str, list[str]]:
    """The programs that steps ask for beyond those of the warm-up."""
    return dict(zip(QUESTIONS, answers_of(json.dumps(list(QUESTIONS.values()))), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("served", QUESTIONS)
def test_no_step_asks_for_a_program_that_was_not_warmed_up(served: str, missing: dict[str, list[str]]) -> None:
    assert missing[served] == []


@pytest.mark.slow
def test_every_gluon_program_compiles_for_hopper(tmp_path: Path) -> None:
    """Triton's interpreter runs no Gluon, so without a GPU nothing else looks at these kernels."""
    quick = {"TRITON_CACHE_DIR": str(tmp_path), "DISABLE_PTXAS_OPT": "1"}
    right = answers_of("--compile", **quick)
    assert {name for name, wrong in right.items() if wrong} == set()
    assert right.keys() == {
        "attention.triton.hopper.prefill_kernel",
        "dense.triton.hopper.linear_kernel",
        "dense.triton.hopper.qkv_kernel",
        "dense.triton.router_hopper.router_kernel",
        *(f"moe.triton.{module}.{kernel}" for module in ("one_hopper", "few_hopper") for kernel in ("gate_up", "down")),
        "moe.triton.many_hopper.product",
    }


@pytest.mark.slow
@TRITON_HERE
def test_the_warm_up_runs_and_writes_no_key() -> None:
    config = random_config(layers=3, mxfp4=True)
    with platform_override(Platform("cuda", frozenset({"triton"}))):
        model = GptOss.from_tensors(config, random_tensors(config).items(), "cpu", torch.bfloat16)
        shape = (4, 16, config.num_key_value_heads, config.head_dim)
        caches = [tuple(torch.randn(shape).bfloat16() for _ in range(2)) for _ in model.layers]
        before = [(keys.clone(), values.clone()) for keys, values in caches]
        warm_up(model, caches, Reach(rows=3, decode_rows=1, keys=2))
    for pair, kept in zip(caches, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(pair, kept, strict=True))
