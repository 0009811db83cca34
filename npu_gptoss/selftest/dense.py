"""Projections and norms in the shapes of a rank, each against the definition.

On Ascend these are vllm-ascend's calls, torch's linear and torch_npu's norms; elsewhere the public operations. No
release for a 910B is known to compute gpt-oss's shapes wrongly; betas of CANN 9.1 did, with fewer than 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from npu_gptoss import dense
from npu_gptoss.kernels import current_platform, platform_override
from npu_gptoss.selftest.outcome import Outcome, judged, poison
from npu_gptoss.selftest.steps import deviation

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
            placed = x.to(device)
            got = _linear(placed, *there).cpu()
            want = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
            if case.infinite is not None:  # what this row holds is nobody's affair; the others must not
                got[case.infinite] = want[case.infinite] = 0
            what = f"{name} [{case.rows}, {inputs}] to {outputs}{' with an Inf' * (case.infinite is not None)}"
            outcome = judged(what, FEW_ROWS, deviation(got, want))
            for _ in range(1, repeats if not outcome.problem else 0):
                again = _linear(placed, *there).cpu()
                if case.infinite is not None:
                    again[case.infinite] = 0
                if not torch.equal(again, got):
                    outcome = replace(outcome, problem="the same inputs gave other bits")
            yield outcome


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
                want = dense.add_norm(whole.float(), None, weight.float(), EPSILON, kernel="reference")[1]
            sums, got = (tensor.cpu() for tensor in _add_norm(*arguments))
            what = f"{name} [{count}, {width}]"
            outcome = judged(what, norm_suspect(width), max(deviation(got, want), deviation(sums, whole)))
            for _ in range(1, repeats if not outcome.problem else 0):
                if not torch.equal(_add_norm(*arguments)[1].cpu(), got):
                    outcome = replace(outcome, problem="the same inputs gave other bits")
            yield outcome


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if current_platform().kind == "ascend":
        return torch.nn.functional.linear(x, weight, bias)
    return dense.output(x, weight, bias)


def _add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its norm."""
    if current_platform().kind != "ascend":
        return dense.add_norm(residual, delta, weight.float(), EPSILON)
    import torch_npu

    if delta is None:
        return residual, torch_npu.npu_rms_norm(residual, weight, EPSILON)[0]
    normed, _, total = torch_npu.npu_add_rms_norm(delta, residual, weight, EPSILON)
    return total, normed
