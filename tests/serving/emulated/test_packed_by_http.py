"""`vllm serve` with packed experts on an emulated card with Triton-Ascend: the answers of a server that expands them.

The trained tiny checkpoint is served in MXFP4, with graphs as a server has them by default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ascend_emulator.launch import Machine, environment
from ascend_emulator.stacks import NAMES, named
from openai import OpenAI

from emulator.tests.machine import venv
from emulator.tests.test_triton import PACKAGES, needs_compiler
from npu_gptoss.model.device_memory import VARIABLE
from npu_gptoss.tiny.checkpoint import write_tiny
from tests.oracle import random_prompts
from tests.serving.server import serve

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.ascend_compiler,
    pytest.mark.slow,
    pytest.mark.long,
    needs_compiler,
]

FLAGS = ("--max-num-seqs", "4", "--max-model-len", "1024", "--num-gpu-blocks-override", "64")
LONG = random_prompts((300,), 1000, seed=3)  # beyond the window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "gpt-oss-tiny"
    write_tiny(path, trained=True, mxfp4=True)
    return path


def asked(url: str) -> dict[str, Any]:
    """A chat, and the tokens of a completion with their log-probabilities."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        common = {"model": "gpt-oss-tiny", "temperature": 0}
        question = {"role": "user", "content": "What is 3 + 4?"}
        chat = client.chat.completions.create(messages=[question], max_tokens=200, **common)
        extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
        text = client.completions.create(prompt=LONG[0], max_tokens=12, logprobs=5, extra_body=extra, **common)
    return {"chat": chat.choices[0].message.content, "completion": text.choices[0].logprobs.model_dump()}


@pytest.mark.parametrize("stack", NAMES)
def test_a_server_with_packed_experts_answers_bit_for_bit_as_one_that_expands_them(
    stack: str, model: Path, tmp_path: Path
) -> None:
    answers, logs, launched = {}, {}, {}
    for wish in ("expanded", "packed"):
        log, trace = tmp_path / f"{wish}.log", tmp_path / f"{wish}.jsonl"
        machine = Machine(named(stack).cann[0], triton=PACKAGES, trace=trace)
        place = venv(machine)
        # tests/conftest.py switches Triton's interpreter on, which would take the device's place
        variables = {**environment(machine, place), VARIABLE: wish, "TRITON_INTERPRET": "0"}
        with serve(model, log, *FLAGS, through=[str(place / "bin/vllm")], variables=variables) as server:
            answers[wish] = asked(server.url)
        logs[wish] = log.read_text()
        launched[wish] = '"triton::expand_kernel"' in trace.read_text()
    assert answers["packed"]["chat"] == "3 + 4 = 7."
    assert len(answers["packed"]["completion"]["token_logprobs"]) == 12
    assert answers["packed"] == answers["expanded"]
    assert launched == {"expanded": False, "packed": True}
    assert logs["packed"].count("experts stay packed in MXFP4 (NPU_GPTOSS_EXPERT_WEIGHTS=packed)") == 1
    assert "experts are expanded to BF16, which " in logs["expanded"]
