"""One rank's share of the weights: the checkpoint's stream, cut before it is put together.

Attention is cut by heads: rows of q, k and v, columns of o, each rank's sinks. The experts are cut through their middle
("tensor": a slice of the intermediate size of each) or dealt out whole ("expert"). lm_head is cut by rows. Ranks
add up partial sums, and a bias that is added before such a sum stays on rank 0 only. The rest,
embedding, norms and router, every rank has whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig, units_around
from npu_gptoss.model.layout import split_layer
from npu_gptoss.moe.mxfp4 import GROUP

TENSOR, EXPERT = "tensor", "expert"

# By the end of a tensor's name: the axis that is cut. In either layout; an axis of groups of 32 is cut between groups.
_HEADS = {
    **{f"self_attn.{name}_proj.{kind}": 0 for name in "qkv" for kind in ("weight", "bias")},
    "self_attn.o_proj.weight": 1,
    "self_attn.sinks": 0,
    "lm_head.weight": 0,
}
_INTERMEDIATE = {
    "mlp.experts.gate_up_proj": 2,
    "mlp.experts.gate_up_proj_blocks": 1,
    "mlp.experts.gate_up_proj_scales": 1,
    "mlp.experts.gate_up_proj_bias": 1,
    "mlp.experts.down_proj": 1,
    "mlp.experts.down_proj_blocks": 2,
    "mlp.experts.down_proj_scales": 2,
}
_PACKED_DOWN = ("experts.down_proj_blocks", "experts.down_proj_scales")


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`; experts: TENSOR or EXPERT."""

    rank: int
    size: int
    experts: str = TENSOR

    def __post_init__(self) -> None:
        if self.experts not in (TENSOR, EXPERT):
            raise InputError(f"experts are shared by {TENSOR!r} or {EXPERT!r}, got {self.experts!r}", field="experts")
        if not 0 <= self.rank < self.size:
            raise InputError(f"a rank must be 0 to {self.size - 1}, got {self.rank}", field="rank")

    @property
    def layout(self) -> str:
        """The name in records: tp1, tp2, ep2 …; attention is cut by heads in both layouts."""
        return f"{'ep' if self.experts == EXPERT and self.size > 1 else 'tp'}{self.size}"

    def check(self, config: GptOssConfig) -> None:
        """Refuses a model that this many ranks cannot share evenly."""
        names = ["num_attention_heads", "num_key_value_heads", "vocab_size"]
        names.append("num_local_experts" if self.experts == EXPERT else "intermediate_size")
        sizes = {name: getattr(config, name) for name in names}
        if config.quantization and "intermediate_size" in sizes:
            sizes["intermediate_size"] //= GROUP
        uneven = {name: size for name, size in sizes.items() if size % self.size}
        if uneven:
            remedy = f"; experts={EXPERT!r} deals them out whole" if "intermediate_size" in uneven else ""
            groups = f" in groups of {GROUP}" if config.quantization and remedy else ""
            named = ", ".join(f"{name} ({size}{groups if name == names[-1] else ''})" for name, size in uneven.items())
            raise InputError(f"{self.size} ranks cannot share {named} evenly{remedy}", field=next(iter(uneven)))

    def local(self, config: GptOssConfig) -> GptOssConfig:
        """The config of this rank's attention and experts; how many experts and tokens there are stays the same."""
        self.check(config)
        inner = config.intermediate_size // (self.size if self.experts == TENSOR else 1)
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // self.size,
            num_key_value_heads=config.num_key_value_heads // self.size,
            intermediate_size=inner,
        )

    def expert_map(self, config: GptOssConfig, device: torch.device) -> torch.Tensor | None:
        """[experts] int64: the index here of each expert, -1 where it lives elsewhere; None: each is cut."""
        if self.experts == TENSOR:
            return None
        count = config.num_local_experts // self.size
        local = torch.arange(config.num_local_experts, device=device) - self.rank * count
        return torch.where((local >= 0) & (local < count), local, -1)

    def axis(self, name: str) -> int | None:
        """The axis of a tensor that is cut; None: every rank has it whole."""
        suffix = split_layer(name)[1]
        if suffix in _HEADS:
            return _HEADS[suffix]
        if suffix.startswith("mlp.experts."):
            return 0 if self.experts == EXPERT else _INTERMEDIATE.get(suffix)
        return None

    def only_on_rank_0(self, name: str) -> bool:
        """True for a bias that is added before ranks are summed."""
        return name.endswith("self_attn.o_proj.bias") or (
            self.experts == TENSOR and name.endswith("mlp.experts.down_proj_bias")
        )

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Cuts this rank's part out of a tensor; a smaller part is a copy.

        Of a packed down_proj whose groups of 32 the ranks do not divide: the whole groups around the part (720 columns
        are 22.5 groups). `trim` takes the rest away, once it is expanded; where it stays packed, `own_pairs` makes the
        rest count nothing.
        """
        if self.size == 1:
            return tensor
        if self.only_on_rank_0(name) and self.rank:
            return torch.zeros_like(tensor)
        axis = self.axis(name)
        if axis is None:
            return tensor
        unit = GROUP if self.experts == TENSOR and name.endswith(_PACKED_DOWN) else 1
        first, end = units_around(self.rank, tensor.shape[axis] * unit // self.size, unit)
        # a view of the first axis is contiguous as it is, and would keep the whole in memory
        return tensor.narrow(axis, first, end - first).clone(memory_format=torch.contiguous_format)

    def trim(self, name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
        """Returns this rank's `width` inputs of a down_proj [experts, in, out] that was cut packed and expanded."""
        if not name.endswith("experts.down_proj") or tensor.shape[1] == width:
            return tensor
        return tensor.narrow(1, self.rank * width % GROUP, width)

    def own_pairs(self, name: str, parameter: torch.Tensor, width: int) -> torch.Tensor:
        """Returns a view of this rank's own `width` columns, of a parameter that has the whole groups around them.

        That is all but of a packed gate_up and its bias, [experts, 2 * columns of whole groups, ...]. With zeros
        outside of the view the activation is (0 + 1) * 0 * sigmoid(0) = 0 there, and what down has of another rank's
        columns counts nothing.
        """
        if "experts.gate_up_proj_" not in name or parameter.shape[1] == 2 * width:
            return parameter
        return parameter.narrow(1, 2 * (self.rank * width % GROUP), 2 * width)

    def cut_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's stream, in either layout."""
        for name, tensor in tensors:
            yield name, self.cut(name, tensor)
            del tensor
