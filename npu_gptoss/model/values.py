"""Checks that all values of a checkpoint are finite, also after a change of dtype.

One NaN in lm_head turns every logit into NaN, and a server answers with nothing, so every tensor is checked while it is
loaded. On a CPU that is one pass over memory (3 GB/s in bfloat16 on one core), less than reading it from a disk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator

import torch

from npu_gptoss.files import wrong

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20  # elements that are compared at once


def checked_values(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, where: object
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the tensors on unchanged; raises CheckpointError for the first that has no finite value in `dtype`.

    Float32 tensors beside bfloat16 ones are rounded where `dtype` is bfloat16, as transformers does. Where that changes
    a value, one warning at the end says in which tensors.
    """
    rounded: list[str] = []
    kinds: set[torch.dtype] = set()
    for name, tensor in tensors:
        if tensor.is_floating_point():
            check_finite(name, tensor, dtype, where)
            kinds.add(tensor.dtype)
            if dtype != tensor.dtype and dtype == torch.bfloat16 and not _exact(tensor, dtype):
                rounded.append(name)
        yield name, tensor
        del tensor  # or it would stay in memory while the next one is read
    if rounded and torch.bfloat16 in kinds:
        others = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        logger.warning(
            "%s: %s%s in float32 beside bfloat16 ones: their values were rounded to bfloat16. "
            "--dtype float32 computes with all as they are.",
            where,
            rounded[0],
            others + (" are" if others else " is"),
        )


def check_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype, where: object) -> None:
    """Raises CheckpointError for a floating-point tensor that has a value which is not finite in `dtype`."""
    if not tensor.numel():
        return
    if tensor.device.type == "cpu":  # its isfinite is twenty times slower than this
        extremes = torch.stack(torch.aminmax(tensor)).to(dtype)
    else:
        extremes = torch.stack((tensor.amin(), tensor.amax())).to(dtype)
    if all(math.isfinite(value) for value in extremes.tolist()):
        return
    places = torch.nonzero(~torch.isfinite(tensor.to(dtype)))
    said = f"{name} should hold finite numbers, got {len(places)} of {tensor.numel()} that are not (the first is"
    said += f" {tensor[tuple(places[0])].item()} at {places[0].tolist()}). The file is damaged, or the training"
    raise wrong(where, f"{said} diverged: download it again, or take an earlier checkpoint.", name)


def _exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return all(torch.equal(part.to(dtype).to(part.dtype), part) for part in tensor.flatten().split(_CHUNK))
