"""The caches' shape, zeros and size; tests/engine/test_scheduler.py hands their blocks out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.engine.kv_cache import CPU_CACHE_BYTES, allocate_kv_caches, default_num_blocks
from tests.checkpoints import random_config
from tests.refused import refused

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_are_zeroed_pairs_for_each_layer(dtype: torch.dtype) -> None:
    config = random_config(layers=3)
    caches = allocate_kv_caches(config, 6, 16, dtype, CPU)
    assert len(caches) == 3
    tensors = [tensor for pair in caches for tensor in pair]
    assert all(
        tensor.shape == (6, 16, 2, 64) and tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors
    )
    assert not any(tensor.any() for tensor in tensors)
    tensors[0].fill_(1)
    assert not any(tensor.any() for tensor in tensors[1:])  # no two share memory


def test_a_cpu_cache_fills_its_budget_but_no_more_than_a_full_batch_needs() -> None:
    config = random_config(layers=4)  # 4 layers x 2 x 2 heads x 64 x 4 bytes = 4 KiB a token
    assert default_num_blocks(config, 16, torch.float32, CPU, 256) == CPU_CACHE_BYTES // (16 * 4096)
    assert default_num_blocks(random_config(max_positions=100), 16, torch.float32, CPU, 3) == 3 * 7


def test_an_accelerators_cache_leaves_a_fifth_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 16 * 4096  # bytes, as above
    device = SimpleNamespace(mem_get_info=lambda device: (100 * block, 1000 * block))
    monkeypatch.setattr(torch, "get_device_module", lambda asked: device)
    assert default_num_blocks(random_config(layers=4), 16, torch.float32, torch.device("cuda"), 256) == 80


def test_a_block_larger_than_the_memory_is_refused() -> None:
    config, tokens = random_config(layers=4, max_positions=1 << 20), CPU_CACHE_BYTES // 4096
    assert default_num_blocks(config, tokens, torch.float32, CPU, 1) == 1
    with refused("num_blocks"):
        default_num_blocks(config, tokens + 1, torch.float32, CPU, 1)
