"""gpt-oss's activation: a SwiGLU with both halves clamped, a steeper sigmoid and one added to `up`.

    gate = min(gate, limit);  up = clamp(up, -limit, limit)
    out  = (up + 1) * gate * sigmoid(1.702 * gate)

(openai/gpt-oss `gpt_oss/torch/model.py`, swiglu.) The columns of gate and up are interleaved in the checkpoint.
"""

from __future__ import annotations

import enum

import torch

from npu_gptoss.errors import InputError

SWIGLUOAI = "swigluoai"
ALPHA = 1.702
LIMIT = 7.0


def activation_name(activation: object) -> str:
    """The name of an activation given as a string or as an enum member (newer vLLM); an unknown one raises.

    Comparing without this let an enum fall through to the plain SwiGLU upstream and garbled three releases.
    """
    value = activation.value if isinstance(activation, enum.Enum) else activation
    if value == SWIGLUOAI:
        return SWIGLUOAI
    raise InputError(
        f"gpt-oss has the activation {SWIGLUOAI!r}, got {activation!r}; another would give wrong text silently",
        field="activation",
    )


def swigluoai(gate_up: torch.Tensor, limit: float = LIMIT) -> torch.Tensor:
    """[..., 2 * intermediate] with gate and up interleaved -> [..., intermediate], in its own dtype."""
    gate = gate_up[..., 0::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(ALPHA * gate))
