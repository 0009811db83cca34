"""Inputs of the dense operations, at sizes that no power of two hides, and how far bf16 results may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.verify.dense_cases import Sizes

Outputs = Sequence[torch.Tensor]
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
        """Caches full of a value that no test writes: an unwritten slot still has it."""
        shape = (6, 4, self.sizes.kv_heads, self.sizes.head_dim)
        return tuple(torch.full(shape, 7.0, dtype=self.delta.dtype, device=self.delta.device) for _ in range(2))

    def run(self, name: str, kernel: Callable, delta: bool = True, /, **changes: object) -> Outputs:
        """The outputs of `dense.<name>` by a function with its arguments: results, then written tensors.

        delta: with something to add (for `output` the residual). changes: of the arguments.
        """
        added = self.delta if delta else None
        stream = {"residual": self.residual, "delta": added, "norm_weight": self.norm, "eps": self.eps}
        keys, values = self.caches()
        arguments: dict[str, object] = {
            "qkv": {
                **stream,
                "weight": self.qkv_weight,
                "bias": self.qkv_bias,
                "cos_sin": self.cos_sin,
                "positions": self.positions,
                "key_cache": keys,
                "value_cache": values,
                "metadata": self.metadata,
            },
            "output": {
                "attended": self.attended,
                "weight": self.output_weight,
                "bias": self.output_bias,
                "residual": self.residual if delta else None,
            },
            "router": {
                **stream,
                "weight": self.router_weight,
                "bias": self.router_bias,
                "top_k": self.sizes.top_k,
                "live": None,
            },
            "add_norm": {**stream, "dtype": self.delta.dtype},
            "logits": {
                "normed": self.delta,
                "weight": self.lm_head,
                "out": self.delta.new_full((len(self.delta), self.sizes.vocab), 7.0),
            },
        }[name]
        arguments |= changes
        result = kernel(**arguments)
        if name == "qkv":
            return (*result, arguments["key_cache"], arguments["value_cache"])
        if name == "logits":
            return (arguments["out"],)
        return (result,) if name == "output" else result


def make_case(
    rows: int,
    real: int | None = None,
    *,
    sizes: Sizes = SIZES,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    first: bool = False,
) -> Case:
    """first: the residual stream is the embedding, in `dtype`; else it is float32."""
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
        residual=normal(rows, hidden, std=2.0)
        if first
        else torch.randn(rows, hidden, generator=generator).to(device) * 2,
        delta=normal(rows, hidden),
        norm=normal(hidden, std=0.3, mean=1.0).float(),
        qkv_weight=normal(packed, hidden, std=hidden**-0.5),
        qkv_bias=normal(packed, std=0.5),
        cos_sin=(torch.cat((angle.cos(), angle.sin()), -1) * 1.3).to(device),
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
