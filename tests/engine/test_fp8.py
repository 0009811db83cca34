"""Projections in eight bits: what they cost in exactness, and that they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_gptoss.dense import RowScaled
from npu_gptoss.engine import Engine
from tests.checkpoints import write_random_checkpoint
from tests.oracle import random_prompts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8") / "checkpoint"
    write_random_checkpoint(path, layers=2)
    return path


def test_eight_bits_cost_a_few_per_cent_of_the_logits(directory: Path) -> None:
    """Weights with three bits of mantissa are off by 2 % on average, and so is each projection."""
    prompts = random_prompts((40, 130), 512)
    exact = torch.cat(Engine(directory, dtype="float32", num_blocks=40).batch_logits(prompts))
    engine = Engine(directory, dtype="float32", num_blocks=40, fp8_projections=True)
    rounded = torch.cat(engine.batch_logits(prompts))
    error = float((rounded - exact).norm() / exact.norm())
    agreement = float((rounded.argmax(-1) == exact.argmax(-1)).float().mean())
    print(f"\nerror {error:.3f} of the logits, same token {agreement:.1%}")
    assert 0.01 < error < 0.15
    assert agreement > 0.85


def test_every_projection_is_in_eight_bits(directory: Path) -> None:
    model = Engine(directory, num_blocks=4, fp8_projections=True).model
    weights = [model.lm_head]
    for layer in model.layers:
        weights += [layer.attention.qkv_weight, layer.attention.output_weight]
    assert all(isinstance(weight, RowScaled) for weight in weights)
    assert model.embedding.dtype == torch.bfloat16  # looked up, not multiplied
