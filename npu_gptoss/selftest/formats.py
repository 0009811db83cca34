"""Weights in FRACTAL_NZ, for a process of its own: what ran before in ND must not decide what runs here.

op-plugin before torch-npu 2.7.1.post7 tells the cached calls of one aclnn function apart by shapes and dtypes, not by
formats. The grouped matmul has a function for each format; torch's linear is asked in the order that would show it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.moe.expert_format import FRACTAL_NZ, VARIABLE
from npu_gptoss.selftest.experts import CASES, Sizes, outcomes
from npu_gptoss.selftest.outcome import Outcome, compared

CAST = "npu_format_cast, where torch-npu allows no internal format"
CACHE = "the cache of executors knows no format (op-plugin, mended in torch-npu 2.7.1.post7)"


def experts(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """The short cases of experts once more, with their weights in FRACTAL_NZ. For good: the variable stays set."""
    os.environ[VARIABLE] = "nz"
    cases = [case for case in CASES if case.at_start and not case.of_part]
    try:
        for outcome in outcomes(cases, sizes, device, dtype, 2):
            yield replace(outcome, what=f"{outcome.what}, in FRACTAL_NZ", suspect="aclnnGroupedMatmulWeightNz")
    except InputError as error:  # the weights stayed in ND
        yield Outcome("experts in FRACTAL_NZ", CAST, 0.0, str(error))


def linear(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """The same product with the weight in ND, in FRACTAL_NZ and in ND again; x is two-dimensional."""
    import torch_npu

    torch.npu.config.allow_internal_format = True  # off by default from torch-npu 2.7.1.post4 on
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(sizes.hidden, sizes.hidden, generator=generator) * sizes.hidden**-0.5).to(dtype)
    plain = weight.to(device)
    cast = torch_npu.npu_format_cast(plain, FRACTAL_NZ)
    if (found := int(torch_npu.get_npu_format(cast))) != FRACTAL_NZ:
        yield Outcome("linear in FRACTAL_NZ", CAST, 0.0, f"the weight has format {found} after the cast")
        return
    for rows in (1, 64):
        x = torch.randn(rows, sizes.hidden, generator=generator).to(dtype)
        got = [torch.nn.functional.linear(x.to(device), w).cpu() for w in (plain, cast, plain)]
        want = torch.nn.functional.linear(x.float(), weight.float())
        yield compared(f"linear of {rows} rows in ND, FRACTAL_NZ and ND", CACHE, lambda got=got: got, [want] * 3)
