"""Queries, keys and values as the one tensor that they are parts of."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.dense.ascend import packed
from npu_gptoss.dense.operations import ROTATE_WRITE, rotate_write_call
from npu_gptoss.kernels import explain, platform_override

HEADS = (8, 2, 2)


def parts(rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    whole = torch.randn(rows, 64 * sum(HEADS)).bfloat16()
    return whole, [part.view(rows, -1, 64) for part in whole.split([64 * heads for heads in HEADS], dim=-1)]


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_are_put_together_without_a_copy(rows: int) -> None:
    whole, three = parts(rows)
    found = packed(*three)
    assert torch.equal(found, whole)
    assert found.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize("rows", [1, 3])
def test_memory_of_no_part_is_not_read(rows: int) -> None:
    _, (query, key, value) = parts(rows)
    turned = key.transpose(1, 2).contiguous().transpose(1, 2)  # in the right place, in another order
    moved = key.as_strided(key.shape, turned.stride())
    for wrong in ((key, query, value), (query, value, key), (query, key.clone(), value), (query, moved, value)):
        with pytest.raises(RuntimeError, match="parts of one tensor"):
            packed(*wrong)


def test_columns_of_a_wider_tensor_are_not_taken_for_the_whole() -> None:
    _, (query, key, _) = parts(3)
    with pytest.raises(RuntimeError, match="parts of one tensor"):
        packed(query, key)


def test_a_card_with_all_heads_of_the_published_models_launches_once() -> None:
    """64 heads of queries and 8 each of keys and values; else five launches more a layer, and no word of it."""
    call = rotate_write_call(torch.bfloat16, 64 + 2 * 8, torch.bfloat16, 64)
    with platform_override("ascend", frozenset({"torch_npu", "triton_ascend"})):
        assert explain(ROTATE_WRITE, *call).selected.solution == "triton_ascend"
