"""The experts' weights in the official BF16 layout, as loaders hand them over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_gptoss.errors import InputError


@dataclass(frozen=True)
class ExpertWeights:
    """The local experts of one layer.

    gate_up_proj: [experts, hidden, 2 * intermediate], columns interleaved gate, up, gate, up …
    gate_up_proj_bias: [experts, 2 * intermediate], interleaved alike.
    down_proj: [experts, intermediate, hidden].
    down_proj_bias: [experts, hidden]; zero on all but one rank when the intermediate size is sharded.
    expert_map: [global experts] int64, the local index of each expert or -1; None: all experts are local.
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj: torch.Tensor
    down_proj_bias: torch.Tensor
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.gate_up_proj.dim() != 3 or self.gate_up_proj.shape[2] % 2:
            raise InputError(
                f"gate_up_proj must be [experts, hidden, 2 * intermediate], got {list(self.gate_up_proj.shape)}"
            )
        experts, hidden, double = self.gate_up_proj.shape
        expected = {
            "gate_up_proj_bias": (experts, double),
            "down_proj": (experts, double // 2, hidden),
            "down_proj_bias": (experts, hidden),
        }
        for name, shape in expected.items():
            got = getattr(self, name)
            if got is None or tuple(got.shape) != shape:
                raise InputError(f"{name} must be {list(shape)}, got {'none' if got is None else list(got.shape)}")

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.gate_up_proj.shape[1]

    def local_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Global expert ids -> local ones, -1 where an expert lives on another rank."""
        return topk_ids if self.expert_map is None else self.expert_map[topk_ids]
