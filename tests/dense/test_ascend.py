"""Queries, keys and values as the one tensor that they are parts of."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.dense.ascend import packed

HEADS = (8, 2, 2)


def parts(rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    whole = torch.randn(rows, 64 * sum(HEADS))
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
