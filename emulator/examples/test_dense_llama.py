"""Example test suite of a stock vllm-ascend user: a dense Llama on the NPU against transformers on the CPU.

Run it on the emulator with: ascend-emulate -- python -m pytest test_dense_llama.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=512,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
    torch_dtype="bfloat16",
)
PROMPTS = [list(range(3, 20)), [7, 5, 3], list(range(40, 240))]
NEW = 24
ROUNDING = 0.05  # of a logit: allowed difference of bfloat16 on the NPU from float32 on the CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(path)
    return path, LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_greedy_tokens_are_those_of_transformers(model: tuple[Path, LlamaForCausalLM], eager: bool) -> None:
    from vllm import LLM, SamplingParams

    path, reference = model
    graphs = {"compilation_config": {"cudagraph_capture_sizes": [4, 2, 1]}}
    engine = LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.5,
        **({"enforce_eager": True} if eager else graphs),
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, ignore_eos=True)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        assert len(tokens) == NEW
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits[torch.arange(NEW), tokens]
        assert lost.max() < ROUNDING, f"tokens that float32 would not choose: {lost.tolist()}"
