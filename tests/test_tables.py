from __future__ import annotations

import pytest

from npu_gptoss.tables import markdown


def test_a_row_that_lacks_a_cell_is_refused() -> None:
    assert markdown(("batch", "ms"), [(1, "2.5")]) == ["| batch | ms |", "|---|---|", "| 1 | 2.5 |"]
    with pytest.raises(ValueError, match="expected 2 cells"):
        markdown(("batch", "ms"), [(1,)])
