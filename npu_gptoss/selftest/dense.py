"""Projections and norms in the shapes of a rank, each against the definition.

On Ascend these are vllm-ascend's calls, torch's linear and torch_npu's norms; elsewhere the public operations. No
release for a 910B is known to compute gpt-oss's shapes wrongly; betas of CANN 9.1 did, with fewer than 64 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from npu_gptoss import dense
from npu_gptoss.kernels import current_platform, platform_override
from npu_gptoss.selftest.outcome import Outcome, compared, poison

EPSILON = 1e-5
FEW_ROWS = "torch's linear with fewer than 64 rows, or with an Inf (ops-nn e3f831f65 and 678cacee2, betas of CANN 9.1)"
NORM = "npu_rms_norm or npu_add_rms_norm"
NARROW = ((300,), 1024)  # up to 2000 wide several rows are one piece of work, on CANN 8.3 and 8.5 without a wait


@dataclass(frozen=True)
class Case:
    """x [rows, inputs] times [outputs, inputs] transposed, plus a bias; the row `infinite` holds one Inf."""

    rows: int
    infinite: int | None = None
    at_start: bool = True


CASES = (
    Case(1),
    Case(16),
    Case(63, infinite=5),
    Case(64, at_start=False),
    Case(257, infinite=64, at_start=False),
)
NORM_ROWS = {True: (1, 40), False: (1, 40, 41, 257)}  # at a start or not; around the number of vector cores


def norm_suspect(width: int) -> str:
    return f"{NORM} up to 2000 wide (ops-nn cf84e2226, mended in CANN 9.0.0)" if width <= 2000 else NORM


def shapes(hidden: int, heads: int, kv_heads: int, head_dim: int, experts: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a rank's projections; the heads are its own."""
    return {
        "qkv_proj": (hidden, (heads + 2 * kv_heads) * head_dim),
        "o_proj": (heads * head_dim, hidden),
        "router": (hidden, experts),
    }


def projections(
    cases: Iterable[Case],
    shapes: dict[str, tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
) -> Iterator[Outcome]:
    """Each case with each projection, `repeats` times with the same inputs."""
    cases = tuple(cases)
    poison(device)
    for name, (inputs, outputs) in shapes.items():
        generator = torch.Generator().manual_seed(inputs + outputs)
        weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        there = weight.to(device), bias.to(device)
        for case in cases:
            x = torch.randn(case.rows, inputs, generator=generator).to(dtype)
            if case.infinite is not None:
                x[case.infinite, 3] = float("inf")
            run = functools.partial(_linear, x.to(device), *there, case.infinite)
            want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
            if case.infinite is not None:
                want[case.infinite] = 0
            what = f"{name} [{case.rows}, {inputs}] to {outputs}{' with an Inf' * (case.infinite is not None)}"
            yield compared(what, FEW_ROWS, run, [want], repeats)


def norms(rows: Iterable[int], width: int, device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[Outcome]:
    """The residual's addition with its norm, and the norm alone."""
    poison(device)
    for count in rows:
        generator = torch.Generator().manual_seed(count)
        residual, delta = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(2))
        weight = (1 + torch.rand(width, generator=generator)).to(dtype)
        there = [tensor.to(device) for tensor in (residual, delta, weight)]
        for name, second in (("add_rms_norm", delta), ("rms_norm", None)):
            arguments = there[0], None if second is None else there[1], there[2]
            with platform_override("cpu"):
                whole = residual if second is None else residual + second
                norm = weight.float(), EPSILON, torch.float32
                want = dense.add_norm(whole.float(), None, *norm, kernel="reference")[1]
            run = functools.partial(_add_norm, *arguments)
            yield compared(f"{name} [{count}, {width}]", norm_suspect(width), run, (whole, want), repeats)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, infinite: int | None
) -> tuple[torch.Tensor, ...]:
    product = torch.nn.functional.linear if current_platform().kind == "ascend" else dense.output
    out = product(x, weight, bias).cpu()
    if infinite is not None:  # what this row holds is nobody's affair; the others must not
        out[infinite] = 0
    return (out,)


def _add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its norm, on the CPU."""
    if current_platform().kind != "ascend":
        total, normed = dense.add_norm(residual, delta, weight.float(), EPSILON, residual.dtype)
        return total.to(residual.dtype).cpu(), normed.cpu()
    import torch_npu

    if delta is None:
        return residual.cpu(), torch_npu.npu_rms_norm(residual, weight, EPSILON)[0].cpu()
    normed, _, total = torch_npu.npu_add_rms_norm(delta, residual, weight, EPSILON)
    return total.cpu(), normed.cpu()
