"""`make serve-emulated`: the trained tiny checkpoint served on the emulated 910B answers and scores as on the CPU.

The card merges heads wrongly, as CANN 8.3 may; the server keeps heads apart (tests/serving/emulated/test_defects.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from emulator.tests.machine import venv
from npu_gptoss.tiny.checkpoint import load_trained
from research.score_server import score_server
from research.tiny_data import evaluation_set
from tests.markdown import blocks, commands, unseen
from tests.scripts.make_serve import made
from tests.serving.server import Server
from tests.tiny.test_trained import build, score

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 600  # seconds; 40 on two idle cores
EXAMPLES = evaluation_set(101, 30)
FEW = 3  # replies that bfloat16's rounding may turn


@dataclass(frozen=True)
class Served:
    """`metrics`, `trace`: of /metrics and the emulator's trace after the printed request alone."""

    printed: str
    url: str
    reply: dict[str, Any]
    metrics: str
    trace: Path


TUTORIAL = ROOT / "docs/tutorials/without-an-accelerator.md"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve_emulated")
    out, trace = folder / "out.txt", folder / "trace.jsonl"
    machine = {"EMULATED_VENV": str(venv()), "EMULATE": f"--defect merged-heads --trace {trace}"}
    with made("serve-emulated", out, limit=START_LIMIT, **machine) as port:
        url = f"http://127.0.0.1:{port}"
        words = shlex.split(next(line for line in out.read_text().splitlines() if line.strip().startswith("curl ")))
        os.truncate(trace, 0)  # the canary's replays
        reply = post(next(word for word in words if word.startswith("http")), json.loads(words[words.index("-d") + 1]))
        metrics = requests.get(f"{url}/metrics", timeout=60).text
        (folder / "first.jsonl").write_bytes(trace.read_bytes())
        yield Served(out.read_text(), url, reply, metrics, folder / "first.jsonl")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return requests.post(url, json=body, timeout=300).json()


def test_the_printed_request_is_answered_rightly(served: Served) -> None:
    assert "on the emulated Ascend 910B" in served.printed
    assert served.reply["choices"][0]["message"]["content"] == "3 + 4 = 7."


def test_the_tutorial_does_not_show_the_metrics_and_the_trace(served: Served) -> None:
    shown = [block.text for block in blocks(TUTORIAL)]
    (metrics,) = (text for text in shown if "attention.paged.ascend" in text)
    assert unseen(metrics, served.metrics) == []
    tokens = served.reply["usage"]
    assert f"The prompt ({tokens['prompt_tokens']} tokens) ran eagerly, each of the" in TUTORIAL.read_text()
    assert f"{tokens['completion_tokens'] - 1} further tokens" in TUTORIAL.read_text()
    (count,) = (command.text for command in commands(TUTORIAL) if command.text.startswith("python3 -c"))
    done = subprocess.run(
        ["sh", "-c", count.replace("/tmp/trace.jsonl", str(served.trace))], capture_output=True, text=True
    )
    (operators,) = (text for text in shown if text.startswith("('aten::addmm'"))
    assert done.stdout == operators


def log_of(served: Served) -> str:
    return Path(re.search(r"its output goes to (\S+)", served.printed)[1]).read_text()


def test_it_really_is_vllm_ascend_with_graphs(served: Served) -> None:
    log = log_of(served)
    assert log.count("keeps heads apart") == 1
    assert "Platform plugin ascend is activated" in log
    assert "mixed prefill-decode, PIECEWISE" in log
    assert "npu-gptoss computes attention by ascend and the experts by ascend" in served.printed


def test_metrics_tell_replays_from_eager_steps(served: Served) -> None:
    """One request alone: its prompt, larger than any graph, runs eagerly; each further token replays a graph."""
    server = Server(served.url, "gpt-oss-tiny", Path())
    before = {mode: server.metric("npu_gptoss_tokens_total", mode=mode) for mode in ("eager", "piecewise")}
    replays = server.metric("npu_gptoss_steps_total", mode="piecewise", bucket="1")
    body = {"model": "gpt-oss-tiny", "prompt": [7] * 517, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    assert post(f"{served.url}/v1/completions", body)["usage"]["completion_tokens"] == 6
    assert server.metric("npu_gptoss_steps_total", mode="piecewise", bucket="1") - replays == 5
    assert server.metric("npu_gptoss_tokens_total", mode="piecewise") - before["piecewise"] == 5
    assert server.metric("npu_gptoss_tokens_total", mode="eager") - before["eager"] == 517
    assert server.metric("npu_gptoss_kernel_info", operation="attention.paged", solution="ascend") == 1
    others = server.metric("npu_gptoss_kernel_info") - server.metric("npu_gptoss_kernel_info", solution="ascend")
    assert others == 0, "what the start check forces does not serve"

    # three requests whose tokens meet in one step are padded to the next captured size
    padding = server.metric("npu_gptoss_padding_tokens_total", mode="piecewise")
    body |= {"n": 3, "prompt": [9] * 3, "max_tokens": 12, "temperature": 1}
    assert post(f"{served.url}/v1/completions", body)["usage"]["completion_tokens"] == 36
    assert server.metric("npu_gptoss_padding_tokens_total", mode="piecewise") - padding >= 10
    assert server.metric("npu_gptoss_steps_total", mode="piecewise", bucket="4") >= 10


def test_the_score_is_that_of_the_cpu(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harmony = pytest.importorskip("openai_harmony")
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(ROOT / ".checkpoints/gpt-oss-tiny"))
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)

    here = score_server(served.url, EXAMPLES)
    state = load_trained()
    cpu = score(
        build(state.config, state.parameters, torch.bfloat16),
        state,
        EXAMPLES,
        lambda text: encoding.encode(text, allowed_special="all"),
    )
    print(f"emulated 910B: {here}\nCPU: {cpu}")
    assert here.overall >= 0.85, str(here)
    assert abs(sum(here.right.values()) - sum(cpu.right.values())) <= FEW, f"{here}; on the CPU {cpu}"
