"""ND or FRACTAL_NZ for the experts' weights on an Ascend: the card is asked, once for each shape.

FRACTAL_NZ (format 29) keeps tiles of 16 x 16 elements together, as the matrix unit reads them. gpt-oss's ND rows are
11 520 and 5 760 bytes long, no multiples of the 512 bytes that a transfer is aligned to. The numbers are the same ones,
only their places differ; no hardware has shown yet which is faster. So the first layer's own weight
is multiplied both ways when it is loaded, the log has both times, and all layers of that shape follow.

In one process, because `npu_grouped_matmul` calls another aclnn function for FRACTAL_NZ: torch-npu before 2.7.1.post7
tells the cached calls of one function apart by shapes and dtypes, not by formats. For the same reason the projections
stay in ND (docs/decisions.md).
"""

from __future__ import annotations

import logging
import statistics
import time

import torch

from npu_gptoss import envs
from npu_gptoss.errors import InputError

logger = logging.getLogger("vllm.npu_gptoss")

VARIABLE = "NPU_GPTOSS_EXPERT_FORMAT"
FRACTAL_NZ = 29
TILE = 16  # what K and N have to be multiples of, for elements of 16 bits
ROWS = 2  # of each expert in the timed call: every expert is read, as in a batch of decodes
REPEATS = 7
GAIN = 0.97  # of the ND time; nearer than that the two are equal, and ND is the plain one
LIMIT = 0.01  # how far the two products may differ, of the largest element

_faster: dict[tuple[torch.Size, torch.device], bool] = {}


def arrange(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`weight` [experts, K, N] in the format that this card multiplies faster, or that the variable names.

    bias: [experts, N] float32, of the timed calls. Raises InputError when NZ is asked for and cannot be had.
    """
    wanted = envs.get(VARIABLE)
    if wanted == "nd":
        return weight
    if weight.dtype != torch.bfloat16 or weight.shape[1] % TILE or weight.shape[2] % TILE:
        if wanted == "nz":
            logger.warning(
                "%s=nz: experts' weights %s of %s stay in ND; FRACTAL_NZ takes bfloat16 with K and N of whole %ds.",
                *(VARIABLE, list(weight.shape), str(weight.dtype).removeprefix("torch."), TILE),
            )
        return weight
    if wanted == "nz":
        if (cast := _cast(weight)) is None:
            raise InputError(
                f"{VARIABLE}=nz, but torch-npu keeps experts' weights {list(weight.shape)} in another format after "
                "npu_format_cast(weight, 29); unset the variable, or set it to nd",
                field=VARIABLE,
            )
        return cast
    if weight.device.type != "npu":  # a card's operators without the card: nothing to time
        return weight
    key = weight.shape, weight.device
    if key not in _faster:
        _faster[key] = _nz_is_faster(weight, bias)
    cast = _cast(weight) if _faster[key] else None
    return weight if cast is None else cast


def _cast(weight: torch.Tensor) -> torch.Tensor | None:
    """The same numbers in FRACTAL_NZ; None where torch-npu keeps the format, which is no error to it but a warning."""
    import torch_npu

    if hasattr(torch, "npu"):
        torch.npu.config.allow_internal_format = True  # off by default from torch-npu 2.7.1.post4 on
    cast = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    return cast if int(torch_npu.get_npu_format(cast)) == FRACTAL_NZ else None


def _nz_is_faster(weight: torch.Tensor, bias: torch.Tensor) -> bool:
    shape = list(weight.shape)
    if (cast := _cast(weight)) is None:
        logger.warning("experts' weights %s: torch-npu does not cast them to FRACTAL_NZ; they stay in ND.", shape)
        return False
    rows = torch.randn(ROWS * weight.shape[0], weight.shape[1], dtype=weight.dtype).to(weight.device)
    counts = torch.full((weight.shape[0],), ROWS, dtype=torch.int64, device=weight.device)
    want, got = (grouped_matmul(rows, one, bias, counts).float() for one in (weight, cast))
    difference = float((want - got).abs().max() / want.abs().max().clamp(min=1e-30))
    if not difference <= LIMIT:  # NaN, too
        logger.error(
            "experts' weights %s: the product with FRACTAL_NZ is %.1f %% from the one with ND on this card, so they "
            "stay in ND. Report it with `npu-gptoss doctor --json`.",
            *(shape, 100 * difference),
        )
        return False
    nd, nz = (_seconds(rows, one, bias, counts) for one in (weight, cast))
    faster = nz < GAIN * nd
    logger.info(
        "experts' weights %s, %d rows, all experts: ND %.3f ms, FRACTAL_NZ %.3f ms; %s is taken "
        "(%s=nd or nz fixes it).",
        *(shape, len(rows), 1e3 * nd, 1e3 * nz, "FRACTAL_NZ" if faster else "ND", VARIABLE),
    )
    return faster


def _seconds(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, counts: torch.Tensor) -> float:
    """Times one product: the median of REPEATS after a first."""
    found = []
    for _ in range(REPEATS + 1):
        torch.npu.synchronize()
        begin = time.perf_counter()
        grouped_matmul(rows, weight, bias, counts)
        torch.npu.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


GROUP_COUNTS = 1  # group_list_type: rows of each group (0: cumulative)
SPLIT_ROWS = 0  # group_type: groups are ranges of rows
ONE_OUTPUT = 2  # split_item


def grouped_matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    group_list: torch.Tensor,
    group_list_type: int = GROUP_COUNTS,
) -> torch.Tensor:
    """[rows, K] sorted by expert, [experts, K, N], [experts, N] float32 -> [rows, N], by `npu_grouped_matmul`."""
    import torch_npu

    return torch_npu.npu_grouped_matmul(
        x=[rows],
        weight=[weight],
        bias=[bias],
        split_item=ONE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=group_list_type,
        group_list=group_list,
    )[0]
