"""Structured output: bfloat16 logits on a CPU do not end the engine, and only the answer of this turn is restricted."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
from vllm.v1.worker import gpu_model_runner

from tests.harmony.conftest import directory, library  # noqa: F401

VOCABULARY = 64


def masked(dtype: torch.dtype) -> torch.Tensor:
    """Logits [2 requests, 64 tokens] after a grammar that allows request "b" the tokens 3 and 40 only."""
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    mask = np.zeros((1, VOCABULARY // 32), dtype=np.int32)
    mask[0, 0], mask[0, 1] = 1 << 3, 1 << 8
    step = types.SimpleNamespace(
        grammar_bitmask=mask, scheduled_spec_decode_tokens={}, structured_output_request_ids={"b": 0}
    )
    batch = types.SimpleNamespace(req_id_to_index={"a": 0, "b": 1})
    gpu_model_runner.apply_grammar_bitmask(step, batch, logits, torch.device("cpu"))
    return logits


def test_bfloat16_logits_are_masked_instead_of_ending_the_engine(patched):
    with patched("cpu-grammar-bitmask"):
        logits = masked(torch.bfloat16)
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [3, 40]
    untouched = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(logits[0], untouched[0])
    assert torch.equal(logits[1, [3, 40]], untouched[1, [3, 40]])


def test_float32_logits_are_masked_as_before(patched):
    with patched():
        expected = masked(torch.float32)
    with patched("cpu-grammar-bitmask"):
        assert torch.equal(masked(torch.float32), expected)


EARLIER = (
    "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>"
    "<|start|>user<|message|>As JSON.<|end|><|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.fixture
def answer_begins(library):  # noqa: F811
    """Asks vLLM's parser whether the grammar applies from here on."""

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return library.encode(text, allowed_special="all")

    parser = GptOssReasoningParser(Tokenizer())
    return lambda text: parser.is_reasoning_end(parser.model_tokenizer.encode(text))


HEADER = "<|start|>assistant<|channel|>"


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        (EARLIER, False),
        (EARLIER + THOUGHT, False),
        (EARLIER + THOUGHT + "<|channel|>final<|message|>", True),
        (EARLIER + THOUGHT + '<|channel|>final<|message|>{"a": 1', True),
        (HEADER + "final <|constrain|>json<|message|>", True),
        (HEADER + "final <|constrain|>json", False),
        (HEADER + "commentary to=functions.f <|constrain|>json<|message|>", False),
        ("<|start|>user<|message|>final", False),
        ("<|start|>user<|channel|>final<|message|>", False),
        (HEADER + "analysis<|message|><|channel|>final<|message|>", False),
        ("The season is", True),  # /v1/completions
    ],
)
def test_structure_applies_from_the_answer_of_this_turn(patched, answer_begins, text, begun):
    with patched("reasoning-end"):
        assert answer_begins(text) is begun
