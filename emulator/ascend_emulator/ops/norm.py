"""RMS norm, alone and with the residual's addition.

In bfloat16 the norm with an addition rounds x * rstd before it multiplies by gamma, on every CANN read (ops-nn,
add_rms_norm.h and add_rms_norm_single_n.h of 8.3, 8.5 and 9.1); the norm alone does not (rms_norm.h, _merge_n.h and
_single_row.h of ops-nn 19c18706).
"""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer

PAIRS = (
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
)
WIDEST_MERGED = 2000  # up to this width several rows are one piece of work


def _rstd_shape(x: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim())


def _normalised(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = _rstd(x, gamma, epsilon)
    return x.float() * rstd * gamma.float(), rstd


def _rstd(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    return torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)


def _check_trailing(call: Call, x: torch.Tensor, gamma: torch.Tensor) -> None:
    call.require(
        list(gamma.shape) == list(x.shape[x.dim() - gamma.dim() :]),
        None,
        f"gamma should have x's trailing dimensions, got x {shape(x)} and gamma {shape(gamma)}",
        Layer.PARAMETER,
    )


@kernel("npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * rstd * gamma in x's dtype, rstd float32), computed in float32."""
    call = Call.of("npu_rms_norm", "aclnnRmsNorm")
    call.require(
        (input.dtype, gamma.dtype) in PAIRS,
        71,
        f"(x, gamma) should be one of {', '.join(f'{name_of(a)}-{name_of(b)}' for a, b in PAIRS)}, got "
        f"{name_of(input.dtype)}-{name_of(gamma.dtype)}",
        Layer.PARAMETER,
    )
    _check_trailing(call, input, gamma)
    y, rstd = poisoned(input.shape, input), poisoned(_rstd_shape(input, gamma), input, torch.float32)
    if call.context.execute:
        value, factor = _normalised(input, gamma, epsilon)
        y.copy_(value)
        rstd.copy_(factor)
    return y, rstd


@kernel("npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x = x1 + x2 rounded to its dtype; (norm of x, rstd float32, x)."""
    return add_normalised(Call.of("npu_add_rms_norm", "aclnnAddRmsNorm"), x1, x2, gamma, epsilon)


def add_normalised(
    call: Call,
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm, and vllm-ascend's operator of the same contract with a bias."""
    dtypes = [t.dtype for t in (x1, x2, gamma)]
    call.require(
        len(set(dtypes)) == 1,
        70,
        f"x1, x2 and gamma should share one dtype, got {', '.join(map(name_of, dtypes))}",
        Layer.PARAMETER,
    )
    call.require(
        x1.shape == x2.shape and 1 <= x1.dim() <= 8,
        70,
        f"x1 and x2 should have one shape of 1 to 8 dimensions, got {shape(x1)} and {shape(x2)}",
        Layer.PARAMETER,
    )
    call.require(x1.numel() > 0, 70, f"no dimension should be zero, got {shape(x1)}", Layer.PARAMETER)
    call.require(epsilon >= 0, 70, f"epsilon should not be negative, got {epsilon}", Layer.PARAMETER)
    _check_trailing(call, x1, gamma)
    y, x = poisoned(x1.shape, x1), poisoned(x1.shape, x1)
    rstd = poisoned(_rstd_shape(x1, gamma), x1, torch.float32)
    if call.context.execute:
        x.copy_(x1.float() + x2.float())
        factor = _rstd(x, gamma, epsilon)
        value = x.float() * factor
        if x.dtype == torch.bfloat16:
            value = call.context.rounded(value, x.dtype).float()
        value = value * gamma.float()
        y.copy_(value if beta is None else value + beta.float())
        rstd.copy_(factor)
        if "narrow-norm" in call.context.defects and x.size(-1) <= WIDEST_MERGED and x.size(0) > 1:
            y[-1] = y[-2]
    return y, rstd, x
