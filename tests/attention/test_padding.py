from __future__ import annotations

import pytest
import torch

from npu_gptoss.attention.padding import unpad, zero_tail
from npu_gptoss.errors import InputError


def test_unpad_is_a_view_without_the_tail():
    rows = torch.arange(5.0)
    assert unpad(rows, 3).data_ptr() == rows.data_ptr()
    assert unpad(rows, 3).tolist() == [0, 1, 2]


def test_unpad_names_what_is_too_short():
    with pytest.raises(InputError, match="key has 2 rows for 3 tokens"):
        unpad(torch.zeros(2), 3, "key")


def test_tail_of_nan_becomes_zero_in_place():
    out = torch.full((4, 2), float("nan"))
    out[:3] = 1
    assert zero_tail(out, 3) is out
    assert out.tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert zero_tail(out, 4).tolist()[0] == [1, 1]
