"""Inputs of the dense operations, at sizes that no power of two hides, and how far bf16 results may differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.verify.cases import Sizes

__all__ = ["Case", "Sizes", "make_case"]


SIZES = Sizes()


@dataclass(frozen=True)
class Case:
    """One layer's small operations for `rows` rows of which `real` are no padding."""

    sizes: Sizes
    residual: torch.Tensor
    delta: torch.Tensor
    norm: torch.Tensor
    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    attended: torch.Tensor
    output_weight: torch.Tensor
    output_bias: torch.Tensor
    router_weight: torch.Tensor
    router_bias: torch.Tensor
    lm_head: torch.Tensor
    metadata: AttentionMetadata
    eps: float = 1e-5

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Holding a value that no test writes: a slot that nobody wrote still has it."""
        shape = (6, 4, self.sizes.kv_heads, self.sizes.head_dim)
        return tuple(torch.full(shape, 7.0, dtype=self.residual.dtype, device=self.residual.device) for _ in range(2))


def make_case(
    rows: int,
    real: int | None = None,
    *,
    sizes: Sizes = SIZES,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    real = rows if real is None else real

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype).to(device)

    hidden, inner = sizes.hidden, sizes.heads * sizes.head_dim
    packed = inner + 2 * sizes.kv_heads * sizes.head_dim
    angle = torch.rand(64, sizes.head_dim // 2, generator=generator) * 6.28
    slots = torch.randperm(24, generator=generator)[:real]
    return Case(
        sizes=sizes,
        residual=normal(rows, hidden, std=2.0),
        delta=normal(rows, hidden),
        norm=normal(hidden, std=0.3, mean=1.0).float(),
        qkv_weight=normal(packed, hidden, std=hidden**-0.5),
        qkv_bias=normal(packed, std=0.5),
        cos_sin=(torch.cat((angle.cos(), angle.sin()), -1) * 1.3).to(dtype).to(device),
        positions=torch.randint(1, 64, (rows,), generator=generator).to(device),
        attended=normal(rows, inner),
        output_weight=normal(hidden, inner, std=inner**-0.5),
        output_bias=normal(hidden, std=0.5),
        router_weight=normal(sizes.experts, hidden, std=hidden**-0.5),
        router_bias=normal(sizes.experts, std=0.5),
        lm_head=normal(sizes.vocab, hidden, std=hidden**-0.5),
        metadata=AttentionMetadata(
            query_start_loc=tuple(range(real + 1)),
            seq_lens=(1,) * real,
            block_table=torch.zeros(real, 1, dtype=torch.int32, device=device),
            slot_mapping=slots.to(device),
        ),
    )
