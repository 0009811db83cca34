"""Weights in FRACTAL_NZ, for a process of its own: what ran before in ND must not decide what runs here.

op-plugin before torch-npu 2.7.1.post8 finds the kernel of an earlier call by shapes and names, not by formats. The
grouped matmul has another name for each format; torch's linear is asked in the order that would show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

import torch

from npu_gptoss.moe import PreparedExperts, expert_mlp, prepare_experts
from npu_gptoss.moe.ascend import AscendExperts
from npu_gptoss.selftest.experts import Layer, Sizes, always, anywhere
from npu_gptoss.selftest.outcome import Outcome, judged
from npu_gptoss.selftest.steps import deviation

FRACTAL_NZ = 29
TOKENS = 17
EXPERTS = "aclnnGroupedMatmulWeightNz"
CACHE = "the cache of executors knows no format (op-plugin, mended in torch-npu 2.7.1.post8)"


def _cast(weight: torch.Tensor) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ)


def _kept_nd(weight: torch.Tensor, what: str) -> Outcome | None:
    """`npu_format_cast` leaves the format alone, with one warning, where internal formats are not allowed."""
    import torch_npu

    found = int(torch_npu.get_npu_format(weight))
    if found == FRACTAL_NZ:
        return None
    return Outcome(what, "npu_format_cast", 0.0, f"the weight has format {found} after the cast to {FRACTAL_NZ}")


def experts(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """Both grouped matmuls with weights in FRACTAL_NZ; nothing where CANN's operators do not serve."""
    layer = Layer.random(sizes, 1.0, dtype)
    prepared = prepare_experts(layer.weights(device))
    if not isinstance(prepared.weights, AscendExperts):
        return
    torch.npu.config.allow_internal_format = True  # False by default from torch-npu 2.7.1.post4 on
    names = ("gate_up_proj", "down_proj")
    cast = {name: _cast(getattr(prepared.weights, name)) for name in names}
    for name, weight in cast.items():
        if outcome := _kept_nd(weight, f"{name} in FRACTAL_NZ"):
            yield outcome
            return
    weights = replace(prepared.weights, **cast)
    paths = MappingProxyType({rows: (kernel, weights) for rows, (kernel, _) in prepared.paths.items()})
    generator = torch.Generator().manual_seed(0)
    for name, choose in (("some tokens", anywhere), ("all to one expert", always(1))):
        ids = choose(TOKENS, sizes, generator)
        hidden = torch.randn(TOKENS, sizes.hidden, generator=generator).to(dtype)
        topk_weights = torch.rand(ids.shape, generator=generator).softmax(-1)
        inputs = (tensor.to(device) for tensor in (topk_weights, ids))
        got = expert_mlp(hidden.to(device), PreparedExperts(paths, sizes.hidden, prepared.swiglu_limit), *inputs).cpu()
        want = layer.want(hidden, topk_weights, ids)
        yield judged(f"experts in FRACTAL_NZ, {name}", EXPERTS, deviation(got, want))


def linear(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """The same product with the weight in ND, in FRACTAL_NZ and in ND again."""
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(sizes.hidden, sizes.hidden, generator=generator) * sizes.hidden**-0.5).to(dtype)
    plain = weight.to(device)
    cast = _cast(plain)
    if outcome := _kept_nd(cast, "linear in FRACTAL_NZ"):
        yield outcome
        return
    for rows in (1, 64):
        x = torch.randn(rows, sizes.hidden, generator=generator).to(dtype)
        got = [torch.nn.functional.linear(x.to(device), w).cpu() for w in (plain, cast, plain)]
        want = torch.nn.functional.linear(x.float(), weight.float())
        found = max(deviation(one, want) for one in got)
        yield judged(f"linear of {rows} rows in ND, FRACTAL_NZ and ND", CACHE, found)
