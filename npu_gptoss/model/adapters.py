"""LoRA adapters beside the model's weights: each row of a step has one of them or none.

    y = W x + b + B A x

B holds the adapter's scaling. A projection's adapters share one matrix A and one B, and between the two products a row
keeps only its own adapter's part. So a step needs no list of rows, and one graph serves any mix. Experts add theirs in
their own products (`moe.adapters`). Rows without an adapter add zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from npu_gptoss import dense
from npu_gptoss.attention import StepMetadata
from npu_gptoss.dense import small_ops
from npu_gptoss.errors import InputError
from npu_gptoss.model.layout import split_layer
from npu_gptoss.model.transformer import GptOss, KVCache
from npu_gptoss.model.weights import OFFICIAL
from npu_gptoss.moe.adapters import ExpertAdapters, ExpertPair, expert_mlp
from npu_gptoss.moe.triton.layout import TiledExperts, bands

Factors = tuple[torch.Tensor, torch.Tensor]  # A [..., rank, in] and B [..., out, rank] of one official tensor
PROJECTIONS = OFFICIAL["attention"]["qkv_weight"]
OUTPUT, ROUTER, GATE_UP, DOWN = OTHERS = (
    *OFFICIAL["attention"]["output_weight"],
    *OFFICIAL["moe"]["router_weight"],
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
LEAST_RANK = 16  # of experts: what a product of the tensor cores takes


@dataclass(frozen=True)
class Pair:
    """One linear layer's factors. a: [parts, slots, rank, in]; b: [out, parts, slots, rank]. q, k and v are three
    parts, each with its own A and its own rows of the output."""

    a: torch.Tensor
    b: torch.Tensor

    def add_to(self, out: torch.Tensor, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """out [rows, out] plus B A x, in place. own: [rows, slots * rank], 1 at each row's adapter, else 0."""
        low = F.linear(x, self.a.flatten(0, 2)).unflatten(1, (-1, own.shape[1])) * own[:, None]
        return out.addmm_(low.flatten(1), self.b.flatten(1).t())


class Adapters:
    """Memory for `slots` adapters up to `rank`. `active`: the step has a row with an adapter."""

    def __init__(self, model: GptOss, slots: int, rank: int, rows: int) -> None:
        """rows: of the largest step."""
        self.model, self.rank, self.active = model, rank, False
        self.of_token = torch.full((rows,), -1, dtype=torch.int32, device=model.device)
        self._slot_of_column = torch.arange(slots, dtype=torch.int32, device=model.device).repeat_interleave(rank)
        config = model.config
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        first = (0, query, query + key, query + 2 * key)
        self._rows = {name: slice(*first[part : part + 2]) for part, name in enumerate(PROJECTIONS)}

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=model.dtype, device=model.device)

        def pair(inputs: int, outputs: int, parts: int = 1) -> Pair:
            return Pair(zeros(parts, slots, rank, inputs), zeros(outputs, parts, slots, rank))

        def expert_pair(inputs: int, outputs: int) -> ExpertPair:
            wide = max(rank, LEAST_RANK)
            return ExpertPair(zeros(slots, experts, wide, inputs), zeros(slots, experts, outputs, wide))

        self.layers: list[dict[str, Pair | ExpertPair]] = [
            {
                **dict.fromkeys(PROJECTIONS, pair(hidden, first[-1], 3)),
                OUTPUT: pair(query, hidden),
                ROUTER: pair(hidden, experts),
                GATE_UP: expert_pair(hidden, 2 * inner),
                DOWN: expert_pair(inner, hidden),
            }
            for _ in model.layers
        ]

    @property
    def bytes(self) -> int:
        pairs = {id(pair): pair for layer in self.layers for pair in layer.values()}
        return sum(tensor.nbytes for pair in pairs.values() for tensor in (pair.a, pair.b))

    def check(self, adapter: Mapping[str, Factors]) -> None:
        """Raises InputError for an official tensor that has no place here, and for a rank above the memory's."""
        for name, (a, _) in adapter.items():
            if split_layer(name)[1] not in (*PROJECTIONS, *OTHERS):
                raise InputError(f"{name} has no adapter while serving: attention, router and experts have", field=name)
            if a.shape[-2] > self.rank:
                raise InputError(
                    f"{name} needs rank {a.shape[-2]}, got --max-lora-rank {self.rank}: start with a larger one",
                    field="--max-lora-rank",
                )

    def write(self, slot: int, adapter: Mapping[str, Factors]) -> None:
        """Replaces the adapter of a slot; what `adapter` (checked) does not name becomes zero."""
        for layer in range(len(self.layers)):
            for name in (*PROJECTIONS, *OTHERS):
                for place in self._places(layer, name, slot):
                    place.zero_()
        for name, (a, b) in adapter.items():
            layer, suffix = split_layer(name)
            to_a, to_b = self._places(layer, suffix, slot)
            if suffix == GATE_UP and isinstance(self.model.layers[layer].moe.experts.weights, TiledExperts):
                b = bands(b)
            to_a[..., : a.shape[-2], :].copy_(a)
            to_b[..., : b.shape[-1]].copy_(b)

    def _places(self, layer: int, name: str, slot: int) -> Iterator[torch.Tensor]:
        pair = self.layers[layer][name]
        if isinstance(pair, ExpertPair):
            return iter((pair.a[slot], pair.b[slot]))
        part = PROJECTIONS.index(name) if name in PROJECTIONS else 0
        return iter((pair.a[part, slot], pair.b[self._rows.get(name, slice(None)), part, slot]))

    def assign(self, of_token: torch.Tensor) -> None:
        """of_token: [rows] int32 on the host, the slot of each row of the next steps; negative: none."""
        on_host = of_token.pin_memory() if self.of_token.is_cuda else of_token
        self.of_token.copy_(on_host, non_blocking=True)

    def step(self, rows: int) -> AdaptedStep:
        own = self.of_token[:rows]
        return AdaptedStep(self, own, (own[:, None] == self._slot_of_column).to(self.model.dtype))


@dataclass(frozen=True)
class AdaptedStep:
    """`GptOss.enter` and `GptOss.leave` for rows with adapters. own: as in `Pair.add_to`."""

    adapters: Adapters
    of_token: torch.Tensor
    own: torch.Tensor

    def enter(
        self,
        index: int,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: StepMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, pairs = self.adapters.model, self.adapters.layers[index]
        weights = model.layers[index].attention
        residual, normed = model.add_norm(residual, delta, weights.norm)
        packed = F.linear(normed, weights.qkv_weight, weights.qkv_bias)
        pairs[PROJECTIONS[0]].add_to(packed, normed, self.own)
        return residual, _rope_cache(packed, model.cos_sin, positions, *kv_cache, metadata)

    def leave(
        self, index: int, residual: torch.Tensor, attended: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, pairs = self.adapters.model, self.adapters.layers[index]
        attention, moe, heads = model.layers[index].attention, model.layers[index].moe, attended.flatten(1)
        delta = F.linear(heads, attention.output_weight, attention.output_bias)
        residual, normed = model.add_norm(residual, pairs[OUTPUT].add_to(delta, heads, self.own), moe.norm)
        logits = F.linear(normed, moe.router_weight, moe.router_bias)
        pairs[ROUTER].add_to(logits, normed, self.own)
        topk_weights, topk_ids = small_ops.route_live(logits, model.config.num_experts_per_tok, live)
        experts = ExpertAdapters(pairs[GATE_UP], pairs[DOWN], self.of_token)
        return residual, expert_mlp(normed, moe.experts, topk_weights, topk_ids, experts)


def _rope_cache(packed: torch.Tensor, *step: object) -> torch.Tensor:
    if packed.device.type != "cuda":
        return dense.rotate_write(packed, *step)
    from npu_gptoss.dense.triton import launches

    return launches.rope_cache(packed, *step)
