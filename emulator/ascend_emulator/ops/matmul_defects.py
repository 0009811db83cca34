"""torch's matmul as a defective kernel computes it; `ascend_emulator.defects` names the source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ascend_emulator.context import current

ROWS, COLUMNS = 64, 16


def spoilt(matmul: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operator, with the defect few-rows if it is switched on; checked at each call."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = matmul(*args, **kwargs)
        if "few-rows" in current().defects and out.size(0) < ROWS:
            out[:, -COLUMNS:] = 0
        return out

    return run
