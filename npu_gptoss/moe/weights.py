"""The experts' weights as loaders hand them over: in floats, in MXFP4, in FP8.

A kernel says by the dtype of its `weight` role which of them it takes. All have the same biases and the same expert
map, and all can be expanded to floats, which defines what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.signature import dtype_name, expect
from npu_gptoss.moe import mxfp4

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


def _check(weights: object, dtype: torch.dtype | None, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        expect(name, getattr(weights, name), *shape, dtype=dtype)


def _check_pairs(name: str, gate_up: torch.Tensor, layout: str, pairs: int) -> None:
    """A gate without its up would be dropped silently. pairs: the axis of both in `layout`."""
    if gate_up.dim() != len(layout.split(", ")) or gate_up.shape[pairs] % 2:
        raise InputError(f"{name} must be [{layout}], got {list(gate_up.shape)}", field=name)


class _Experts:
    """The base of the three formats: biases in the dtype of the activations, and the map of expert parallelism."""

    gate_up_proj_bias: torch.Tensor
    down_proj_bias: torch.Tensor
    expert_map: torch.Tensor | None

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj_bias.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down_proj_bias.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.gate_up_proj_bias.shape[1] // 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations: that of the biases, which stay floats in every format."""
        return self.gate_up_proj_bias.dtype

    @property
    def device(self) -> torch.device:
        return self.gate_up_proj_bias.device

    def rows(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's gate_up_proj or down_proj as floats [out, in], in `dtype` or float32."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """[experts, out, in] of both projections."""
        experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        return {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}

    def expand(self, dtype: torch.dtype) -> ExpertWeights:
        """The same weights as floats, one expert at a time: exactly, or each rounded once (FP8 in bfloat16)."""
        floats = {}
        for name, (experts, rows, inputs) in self.shapes.items():
            floats[name] = torch.empty(experts, inputs, rows, dtype=dtype, device=self.device)
            for expert in range(experts):
                floats[name][expert].copy_(self.rows(name, expert, dtype).t())
        biases = {"gate_up_proj_bias": self.gate_up_proj_bias, "down_proj_bias": self.down_proj_bias}
        return ExpertWeights(**floats, **biases, expert_map=self.expert_map)

    def local_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Global expert ids -> local ones, -1 where an expert lives on another rank and where the id is negative."""
        if self.expert_map is None:
            return topk_ids
        return torch.where(topk_ids < 0, -1, self.expert_map[topk_ids.clamp(min=0)])


@dataclass(frozen=True)
class ExpertWeights(_Experts):
    """The local experts of one layer, in the official BF16 layout.

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
        _check_pairs("gate_up_proj", self.gate_up_proj, "experts, hidden, 2 * intermediate", 2)
        experts, hidden, double = self.gate_up_proj.shape
        _check(
            self,
            None,
            gate_up_proj_bias=(experts, double),
            down_proj=(experts, double // 2, hidden),
            down_proj_bias=(experts, hidden),
        )

    @property
    def format(self) -> str:
        """The name that kernels ask for in their `weight` role."""
        return dtype_name(self.gate_up_proj.dtype)

    def rows(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return getattr(self, name)[expert].t()

    def expand(self, dtype: torch.dtype) -> ExpertWeights:
        """Itself: floats are not expanded, and a kernel that takes them takes their dtype."""
        return self


@dataclass(frozen=True)
class Mxfp4Experts(_Experts):
    """The local experts of one layer in the official MXFP4 layout (`mxfp4.py`): rows are outputs.

    gate_up_proj_blocks: [experts, 2 * intermediate, hidden / 32, 16] uint8, rows interleaved gate, up, gate, up …
    gate_up_proj_scales: [experts, 2 * intermediate, hidden / 32] uint8.
    down_proj_blocks: [experts, hidden, intermediate / 32, 16] uint8; down_proj_scales without the last axis.
    Biases and expert_map as in `ExpertWeights`.
    """

    format: ClassVar[str] = "mxfp4"

    gate_up_proj_blocks: torch.Tensor
    gate_up_proj_scales: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj_blocks: torch.Tensor
    down_proj_scales: torch.Tensor
    down_proj_bias: torch.Tensor
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout = "experts, 2 * intermediate, hidden / 32, 16"
        _check_pairs("gate_up_proj_blocks", self.gate_up_proj_blocks, layout, 1)
        experts, double, groups, _ = self.gate_up_proj_blocks.shape
        hidden, inner_groups = groups * mxfp4.GROUP, double // 2 // mxfp4.GROUP
        _check(
            self,
            torch.uint8,
            gate_up_proj_blocks=(experts, double, groups, mxfp4.GROUP // 2),
            gate_up_proj_scales=(experts, double, groups),
            down_proj_blocks=(experts, hidden, inner_groups, mxfp4.GROUP // 2),
            down_proj_scales=(experts, hidden, inner_groups),
        )
        _check(self, None, gate_up_proj_bias=(experts, double), down_proj_bias=(experts, hidden))

    def rows(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        blocks, scales = getattr(self, name + "_blocks"), getattr(self, name + "_scales")
        return mxfp4.expand(blocks[expert], scales[expert], dtype)


@dataclass(frozen=True)
class Fp8Experts(_Experts):
    """The local experts of one layer in FP8 (E4M3) with one scale an output channel; made by `quantize_fp8`.

    gate_up_proj: [experts, 2 * intermediate, hidden] float8_e4m3fn, rows interleaved gate, up, gate, up …
    gate_up_proj_scales: [experts, 2 * intermediate] float32; a weight is its value times its row's scale.
    down_proj: [experts, hidden, intermediate]; down_proj_scales: [experts, hidden].
    Biases and expert_map as in `ExpertWeights`.
    """

    format: ClassVar[str] = "float8_e4m3fn"

    gate_up_proj: torch.Tensor
    gate_up_proj_scales: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scales: torch.Tensor
    down_proj_bias: torch.Tensor
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_pairs("gate_up_proj", self.gate_up_proj, "experts, 2 * intermediate, hidden", 1)
        experts, double, hidden = self.gate_up_proj.shape
        _check(self, FP8, gate_up_proj=(experts, double, hidden), down_proj=(experts, hidden, double // 2))
        _check(self, torch.float32, gate_up_proj_scales=(experts, double), down_proj_scales=(experts, hidden))
        _check(self, None, gate_up_proj_bias=(experts, double), down_proj_bias=(experts, hidden))

    def rows(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return getattr(self, name)[expert].float() * getattr(self, name + "_scales")[expert, :, None]


AnyExperts = ExpertWeights | Mxfp4Experts | Fp8Experts


def _quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] floats -> [out, in] E4M3 and [out] float32; each row's largest magnitude becomes 448."""
    wide = rows.float()
    scales = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / FP8_LARGEST
    return (wide / scales[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8), scales


def quantize_fp8(weights: AnyExperts) -> Fp8Experts:
    """Experts in floats or MXFP4 to FP8 with a scale an output channel; one expert at a time. Loses precision."""
    if isinstance(weights, Fp8Experts):
        return weights
    made: dict[str, torch.Tensor] = {}
    for name in weights.shapes:
        made |= vars(converted(weights, name, Fp8Experts, weights.num_experts))
    return Fp8Experts(
        **made,
        gate_up_proj_bias=weights.gate_up_proj_bias,
        down_proj_bias=weights.down_proj_bias,
        expert_map=weights.expert_map,
    )


def lone(kind: type[AnyExperts], tensors: Mapping[str, torch.Tensor]) -> AnyExperts:
    """Experts that have the tensors of one projection only: enough for `rows`, `converted` and a kernel's layout."""
    made = object.__new__(kind)
    vars(made).update(tensors)
    return made


def converted(weights: AnyExperts, name: str, kind: type[Mxfp4Experts | Fp8Experts], experts: int) -> AnyExperts:
    """One projection in another format (`lone`), one expert at a time: in MXFP4 by the published recipe, as
    `npu-gptoss convert` writes it; in FP8 with a scale an output channel."""
    if isinstance(weights, kind):
        return weights
    packs = kind is Mxfp4Experts
    made: list[torch.Tensor] = []
    for expert in range(experts):
        rows = weights.rows(name, expert, torch.float32).contiguous()
        parts = mxfp4.compress(rows, published=True) if packs else _quantize_rows(rows)
        made = made or [part.new_empty((experts, *part.shape)) for part in parts]
        for whole, part in zip(made, parts, strict=True):
            whole[expert] = part
    return lone(kind, {f"{name}_blocks" if packs else name: made[0], f"{name}_scales": made[1]})
