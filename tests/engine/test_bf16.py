"""bf16 against fp32, compared with transformers' bf16.

`make test PYTEST_ARGS="tests/engine/test_bf16.py -s"` prints the figures of docs/accuracy.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from npu_gptoss.engine import Engine
from tests.oracle import load_oracle, oracle_logits, random_prompts

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM

LENGTHS = (1, 5, 16, 40, 127, 128, 130, 255, 300)


@pytest.fixture(scope="module")
def engines(directory: Path) -> dict[str, Engine]:
    return {dtype: Engine(directory, dtype=dtype, num_blocks=200) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def rounded(directory: Path) -> GptOssForCausalLM:
    return load_oracle(directory, torch.bfloat16)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, 512)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(engines, rounded, prompts) -> None:
    want = torch.cat(engines["float32"].batch_logits(prompts))
    got = {
        "ours": torch.cat(engines["bfloat16"].batch_logits(prompts)),
        "transformers": torch.cat([oracle_logits(rounded, prompt) for prompt in prompts]),
    }
    error = {name: float((logits - want).abs().mean()) for name, logits in got.items()}
    agreement = {name: float((logits.argmax(-1) == want.argmax(-1)).float().mean()) for name, logits in got.items()}
    print(f"\n{len(want)} rows, mean logit error {error}, argmax as in fp32 {agreement}")
    assert 0 < error["ours"] < 1.1 * error["transformers"]
    assert agreement["ours"] > max(0.9, agreement["transformers"] - 0.02)
