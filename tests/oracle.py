"""transformers' own gpt-oss (eager attention) as the oracle for whole models; tests skip without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM


def load_oracle(directory: Path, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    transformers = pytest.importorskip("transformers")
    model = transformers.GptOssForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=dtype)
    return model.eval()


@torch.no_grad()
def oracle_logits(model: GptOssForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] float32, without a cache."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def oracle_greedy(model: GptOssForCausalLM, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The next `count` tokens, with transformers' own cache and no stop token."""
    ids = torch.tensor([list(token_ids)])
    settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tuple(out[0, len(token_ids) :].tolist())


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
