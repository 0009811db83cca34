"""Values: NaN and infinity are refused by name; float32 among bfloat16 is taken, and rounding is logged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.model import memory
from npu_gptoss.model.checkpoint import CheckpointError, iterate_tensors, write_checkpoint
from npu_gptoss.model.values import checked_values
from tests.checkpoints import random_config, random_tensors
from tests.refused import refused

BF16, F32 = torch.bfloat16, torch.float32
NORM = "model.layers.0.input_layernorm.weight"
SINKS = "model.layers.1.self_attn.sinks"


def checked(tensor: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    return dict(checked_values([("x", tensor)], dtype, "here"))["x"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4321, -1])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value: float, place: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(100, 99, dtype=dtype)
    assert checked(tensor) is tensor
    tensor.view(-1)[place] = value
    with refused("x", CheckpointError):
        checked(tensor)


def test_float32_that_overflows_bfloat16_is_refused() -> None:
    tensor = torch.tensor([1.0, torch.finfo(F32).max])
    assert checked(tensor, F32) is tensor
    with refused("x", CheckpointError):
        checked(tensor, BF16)


def test_bytes_and_nothing_have_no_values_to_check() -> None:
    for tensor in (torch.full((4,), 255, dtype=torch.uint8), torch.empty(0, 5)):
        assert checked(tensor) is tensor


@pytest.mark.parametrize("name", ["lm_head.weight", NORM, "model.layers.1.self_attn.k_proj.weight", SINKS])
def test_a_nan_in_any_tensor_is_refused_when_it_is_read(tmp_path: Path, name: str) -> None:
    config = random_config(vocab_size=64, layers=2, hidden=64, intermediate=32)
    tensors = random_tensors(config)
    tensors[name].view(-1)[3] = float("nan")
    write_checkpoint(tmp_path, config, tensors)
    with refused(name, CheckpointError):
        list(iterate_tensors(tmp_path, config, dtype=BF16, progress=False))


@pytest.mark.parametrize(("exact", "lines"), [(True, 0), (False, 1)])
def test_float32_norms_and_sinks_among_bfloat16_are_taken(tmp_path, caplog, exact, lines) -> None:
    """Tools that fine-tune leave them so. Values that bfloat16 holds give the same tokens, others are rounded."""
    config = random_config(vocab_size=64, layers=2, hidden=64, intermediate=32)
    tensors = random_tensors(config)
    write_checkpoint(tmp_path, config, tensors)
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=8)
    want = Engine(tmp_path, num_blocks=20).generate(prompt, params)[0].token_ids
    mixed = {n: t.float() + (0 if exact else 1e-5) if n in (NORM, SINKS) else t for n, t in tensors.items()}
    save_file(mixed, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        got = Engine(tmp_path, num_blocks=20).generate(prompt, params)[0].token_ids
    found = [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()]
    assert len(found) == lines
    assert all(NORM in line and "1 more" in line for line in found)
    assert got == want


def test_weights_that_memory_cannot_hold_are_refused_before_one_is_read(tmp_path, monkeypatch) -> None:
    config = random_config(vocab_size=64, layers=2, hidden=64, intermediate=32)
    write_checkpoint(tmp_path, config, random_tensors(config))
    assert memory.free_memory() > 1 << 28
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 16)
    with refused("memory", CheckpointError):
        Engine(tmp_path)
