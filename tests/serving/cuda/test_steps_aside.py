"""On a GPU, a server that asks for what only vLLM's own gpt-oss has is served by it, behind our front end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npu_gptoss.tiny.checkpoint import write_tiny
from research.score_server import fetched
from tests.endure.server import COMPACT, SHARE
from tests.serving.server import serve

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [pytest.mark.cuda, pytest.mark.slow]

FLAGS = (*COMPACT, *SHARE, "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager")
ASIDE = "npu-gptoss steps aside"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16: vLLM's kernels for MXFP4 are made for larger models."""
    path = tmp_path_factory.mktemp("aside") / "gpt-oss-tiny"
    write_tiny(path, trained=True)
    return path


def test_our_front_end_answers_for_vllms_model(base: Path) -> None:
    body = {"model": "gpt-oss-tiny", "temperature": 0, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    flags = ("--enable-lora", "--lora-target-modules", "o_proj")
    with serve(base, base.parent / "lora.log", *FLAGS, *flags, on="cuda") as running:
        message = fetched(f"{running.url}/v1/chat/completions", body)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("3 + 4 = 7.", "Let me think. 3 + 4 = 7.")
        assert running.log.read_text().count(ASIDE) == 1


def test_pooling_is_vllms_own(base: Path) -> None:
    with serve(base, base.parent / "pooling.log", *FLAGS, "--runner", "pooling", on="cuda") as running:
        found = fetched(f"{running.url}/v1/embeddings", {"model": running.name, "input": "What is 3 + 4?"})
        width = json.loads((base / "config.json").read_text())["hidden_size"]
        assert len(found["data"][0]["embedding"]) == width
        assert running.log.read_text().count(ASIDE) == 1
