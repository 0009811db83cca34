"""Makes test inputs: random attention steps, experts and a layer's small tensors.

All depths of `verify`, the benchmarks and the tests draw from here. Tensors are made on the device of the generator.
The module does not import the model or the engine, because a server's start draws from it too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata, paged_attention, write_kv_cache
from npu_gptoss.attention.padding import with_slack
from npu_gptoss.kernels import Operation, platform_override
from npu_gptoss.kernels.dumping import changed
from npu_gptoss.moe import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts, mxfp4, quantize_fp8
from npu_gptoss.moe.activation import LIMIT

Inputs = Mapping[str, Any]


def widened(inputs: Any) -> Any:
    """A copy with bfloat16 tensors as float32, the input of the definition, and caches too, which may be in FP8."""
    wide = changed(inputs, lambda t: t.float() if t.dtype == torch.bfloat16 else t.clone())
    if isinstance(wide, Mapping):
        wide = {name: value.float() if name in ("key_cache", "value_cache") else value for name, value in wide.items()}
    return wide


def on(inputs: Any, device: torch.device) -> Any:
    """A copy on the device; a kernel that writes in place does not reach the original."""
    return changed(inputs, lambda t: t.clone() if device.type == "cpu" else t.to(device))


def poison(device: torch.device) -> None:
    """Leaves NaN in the memory that the next results will lie in, in blocks of both sizes that the allocator keeps."""
    for count, size in ((1, 64 << 20), (32, 512 << 10)):
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(count)]
        del blocks


# --- attention

WINDOW = 128

# (query rows, keys) of each request. Around the window's edge, around a block's edge, long and empty ones.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode at the window's edge": [(1, n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 130, 255, 700)],
    "prefill from nothing": [(n, n) for n in (1, 2, 16, 17, 127, 128, 129, 300)],
    "chunks that cross the window": [(64, 100), (64, 164), (200, 328), (3, 131), (300, 900)],
    "mixed, one without rows": [(1, 40), (0, 33), (5, 5), (1, 513), (130, 400)],
}

# Contexts so long that a row's keys are split, and as many rows as a busy server decodes.
LARGE_STEPS: dict[str, list[tuple[int, int]]] = {
    "long contexts": [(1, 3000), (200, 2100), (1, 33)],
    "a long context": [(1, 9001)],
    "130 decode rows": [(1, 1 + 7 * n % 301) for n in range(130)],
}


@dataclass(frozen=True)
class Shape:
    """Of the heads and the cache."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


GPT_OSS = Shape(heads=64, kv_heads=8, head_dim=64, block_size=16)


@dataclass
class Step:
    """query [tokens + padding, heads, head_dim]; caches [blocks, block_size, kv_heads, head_dim]; sinks [heads]."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: StepMetadata
    sinks: torch.Tensor

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Step:
        there = changed(self, lambda t: t.to(device, dtype if t.is_floating_point() else None))
        return dataclasses.replace(there, sinks=with_slack(there.sinks))

    def inputs(self, sliding_window: int | None) -> dict[str, Any]:
        """The arguments of `paged_attention`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "scale": self.query.shape[2] ** -0.5, "sliding_window": sliding_window}

    def attend(self, sliding_window: int | None, kernel: str | None = None) -> torch.Tensor:
        """[tokens + padding, heads, head_dim] in a buffer that held NaN, so that unwritten rows show."""
        out = torch.full_like(self.query, float("nan"))
        return paged_attention(**self.inputs(sliding_window), out=out, kernel=kernel)

    def written(self, device: torch.device, kernel: str | None = None) -> Step:
        """On the device, the keys and values of the step's own rows not copied but written by `write_kv_cache`."""
        there, slots = self.to(device), self.metadata.slot_mapping
        new = [cache.flatten(0, 1)[slots].to(device) for cache in (self.key_cache, self.value_cache)]
        caches = [cache.clone() for cache in (there.key_cache, there.value_cache)]
        for cache in caches:
            cache.flatten(0, 1)[there.metadata.slot_mapping] = 0
        metadata = dataclasses.replace(there.metadata, slot_mapping=slots.to(device, torch.int32), plans={})
        write_kv_cache(*new, *caches, metadata, kernel=kernel)
        return dataclasses.replace(there, key_cache=caches[0], value_cache=caches[1], metadata=metadata)

    def want(self, sliding_window: int | None) -> torch.Tensor:
        """The definition's result, in fp32 on the CPU."""
        with platform_override("cpu"):
            return widened(self).attend(sliding_window, "reference")


def one_key_each(slots: torch.Tensor) -> AttentionMetadata:
    """Of a step in which each request has one row and one key, which is stored at its slot."""
    rows = len(slots)
    table = torch.zeros(rows, 1, dtype=torch.int32, device=slots.device)
    return AttentionMetadata(tuple(range(rows + 1)), (1,) * rows, table, slots)


def make_step(
    requests: Sequence[tuple[int, int]],
    shape: Shape,
    generator: torch.Generator,
    padding: int = 0,
    unused: float = math.nan,
    spare_columns: int = 0,
    key_sizes: tuple[float, float] = (1.0, 1.0),
) -> Step:
    """Random float32 contents; blocks out of order; padded rows hold NaN, which must reach nothing.

    unused: the content of cache slots without a key. spare_columns: of the block table, behind the longest request.
    key_sizes: of a request's first key and of its last; with growing keys the running maximum moves in every tile.
    """
    size, device = shape.block_size, generator.device

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    blocks = [-(-keys // size) for _, keys in requests]
    total = sum(blocks) + 2
    order = (torch.randperm(total - 2, generator=generator, device=device) + 1).tolist()
    table = torch.zeros(len(requests), max(blocks) + spare_columns, dtype=torch.int32, device=device)
    caches = torch.full((2, total * size, shape.kv_heads, shape.head_dim), unused, device=device)
    start, slots = [0], []
    for request, (rows, keys) in enumerate(requests):
        mine = torch.tensor([order.pop() for _ in range(blocks[request])], dtype=torch.int64, device=device)
        table[request, : len(mine)] = mine
        places = (mine[:, None] * size + torch.arange(size, device=device)).flatten()[:keys]
        caches[:, places] = normal(keys, 2, shape.kv_heads, shape.head_dim).transpose(0, 1)
        caches[0, places] *= torch.linspace(*key_sizes, keys, device=device).view(-1, 1, 1)
        slots.append(places[keys - rows :])
        start.append(start[-1] + rows)
    query = normal(start[-1] + padding, shape.heads, shape.head_dim)
    query[start[-1] :] = math.nan
    metadata = AttentionMetadata(tuple(start), tuple(keys for _, keys in requests), table, torch.cat(slots))
    caches = caches.view(2, total, size, shape.kv_heads, shape.head_dim)
    # Sinks from -1 to 4: each head has its own, and some outweigh all keys.
    return Step(query, caches[0], caches[1], metadata, torch.linspace(-1, 4, shape.heads, device=device))


def plant(step: Step, window: int) -> None:
    """Plants, in place, two keys for each request's last row that outweigh the rest: at the window's far edge and just
    outside.

    Without them a window that is wrong by one key would move a result by less than bfloat16 rounds. The two keys are
    planted for different heads.
    """
    _, size, kv_heads, dim = step.key_cache.shape
    metadata = step.metadata
    for request, keys in enumerate(metadata.seq_lens):
        last = metadata.query_start_loc[request + 1] - 1
        if last < metadata.query_start_loc[request]:
            continue
        for distance, head in ((window - 1, 0), (window, step.query.shape[1] // kv_heads - 1)):
            at = keys - 1 - distance
            if at < 0:
                continue
            block = int(metadata.block_table[request, at // size])
            query = step.query[last, head]
            # a score of 8 after the scale: above 128 random ones (whose exponentials sum to about exp(5.3))
            step.key_cache[block, at % size, 0] = query * (8 * dim**0.5 / float(query.pow(2).sum()))


def as_decode(step: Step, max_seq_len: int, padding: int = 0) -> Step:
    """The same requests, one row each, as a graph sees them: lengths on the device, `padding` rows without keys."""
    known = step.metadata
    device = known.block_table.device
    lengths = torch.tensor([*known.seq_lens, *[0] * padding], dtype=torch.int32, device=device)
    table = torch.cat((known.block_table, known.block_table.new_zeros(padding, known.block_table.shape[1])))
    slots = torch.cat((known.slot_mapping, known.slot_mapping.new_full((padding,), -1)))
    query = torch.cat((step.query, step.query.new_full((padding, *step.query.shape[1:]), math.nan)))
    return dataclasses.replace(step, query=query, metadata=DecodeMetadata(lengths, table, slots, max_seq_len))


# --- experts

TOP_K = 4
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 96


def random_experts(
    weight_format: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INTERMEDIATE,
) -> AnyExperts:
    """Gate and up reach beyond the clamp of 7 for a visible share; biases are as large as the products."""

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0.0, std, generator=generator)

    wide, narrow = 4 * hidden**-0.5, inner**-0.5
    biases = {"gate_up_proj_bias": normal(experts, 2 * inner, std=4), "down_proj_bias": normal(experts, hidden)}
    if weight_format == "mxfp4":
        gate_up = random_mxfp4((experts, 2 * inner, hidden), wide, generator)
        down = random_mxfp4((experts, hidden, inner), narrow, generator)
        names = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
        return Mxfp4Experts(**dict(zip(names, (*gate_up, *down), strict=True)), **biases)
    matrices = normal(experts, hidden, 2 * inner, std=wide), normal(experts, inner, hidden, std=narrow)
    floats = ExpertWeights(matrices[0], down_proj=matrices[1], **biases)
    if weight_format == Fp8Experts.format:
        return quantize_fp8(floats)
    matrices = {n: getattr(floats, n).to(getattr(torch, weight_format)) for n in ("gate_up_proj", "down_proj")}
    return dataclasses.replace(floats, **matrices)


# E8M0 bytes of 2 ** -7 and 2 ** -6: normal weights of STD reach 2.3 and 4.7 deviations under them, as trained ones do
STD, SCALES = 0.02, (120, 121)
EXPERTS_AT_ONCE = 8  # bounds the memory that drawing them takes


def scales_of(std: float) -> tuple[int, ...]:
    """SCALES moved by whole powers of two, so that weights of another deviation have codes that are spread alike."""
    return tuple(scale + round(math.log2(std / STD)) for scale in SCALES)


def random_mxfp4(
    shape: tuple[int, int, int], std: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values rounded to E2M1 under a drawn scale a group: blocks [..., groups, 16], scales [..., groups].

    shape: [experts, rows, columns], of which a few experts are drawn at once.
    """
    (experts, rows, columns), device = shape, generator.device
    choice = torch.tensor(scales_of(std), device=device, dtype=torch.uint8)
    steps = torch.tensor(mxfp4.E2M1, device=device)
    parts = []
    for first in range(0, experts, EXPERTS_AT_ONCE):
        groups = (min(EXPERTS_AT_ONCE, experts - first), rows, columns // mxfp4.GROUP)
        scales = choice[torch.randint(0, len(choice), groups, generator=generator, device=device)]
        values = torch.randn((*groups, mxfp4.GROUP), generator=generator, device=device)
        values *= std * torch.exp2(127.0 - scales[..., None].float())
        sizes = torch.bucketize(values.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
        codes = sizes | torch.signbit(values).to(torch.uint8) << 3
        parts.append((codes[..., 0::2] | (codes[..., 1::2] << 4), scales))
    blocks, scales = (torch.cat(halves) for halves in zip(*parts, strict=True))
    return blocks, scales


def expert_map(experts: int, first: int, last: int) -> torch.Tensor:
    """[experts]: the place of each of [first, last) on a rank that holds these, -1 for the others."""
    places = torch.full((experts,), -1)
    places[first:last] = torch.arange(last - first)
    return places


def local_share(weights: AnyExperts, first: int, last: int) -> AnyExperts:
    """The experts [first, last) as one rank of an expert-parallel group holds them."""
    parts = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights) if f.name != "expert_map"}
    places = expert_map(weights.num_experts, first, last)
    return dataclasses.replace(weights, **{n: t[first:last] for n, t in parts.items()}, expert_map=places)


def expert_inputs(
    weight_format: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    *,
    top_k: int = TOP_K,
    share: tuple[int, int] | None = None,
    same: bool = False,
    padding: bool = False,
    **sizes: int,
) -> dict[str, Any]:
    """The arguments of `expert_mlp`, and the logits that they follow from.

    share: the experts that are here. same: every token goes to the first experts. padding: every third token is a
    padding row with ids of -1. sizes: of `random_experts`.
    """
    weights = random_experts(weight_format, dtype, generator, **sizes)
    logits = torch.randn(tokens, weights.num_experts, generator=generator)
    if same:
        logits[:, :top_k] += 50
    values, ids = logits.topk(top_k, dim=-1)
    routing = torch.softmax(values, -1)
    states = torch.randn(tokens, weights.hidden_size, generator=generator).to(dtype)
    if padding:
        ids[::3], routing[::3], states[::3] = -1, 0.0, math.nan
    return {
        "hidden_states": states,
        "weights": weights if share is None else local_share(weights, *share),
        "topk_weights": routing,
        "topk_ids": ids,
        "logits": logits,
        "swiglu_limit": LIMIT,
    }


def chosen(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A routing as it is compared: bf16 logits tie, and then either expert is right, so the logits that were chosen,
    and how many experts are distinct."""
    inside = ids.long().clamp(0, logits.shape[1] - 1)
    marks = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_(1, inside, 1)
    found = torch.where(inside == ids, logits.float().gather(1, inside), float("nan"))
    return {"weights": weights, "logits": found, "distinct": marks.sum(-1)}


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of floats, on the CPU: they distinguish -0 from 0."""
    return values.cpu().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


# --- the rest of a layer

EPS = 1e-5
BLOCKS, BLOCK_SIZE, UNTOUCHED = 80, 4, 7.0  # of the caches that QKV writes to; the content of an unwritten slot


@dataclass(frozen=True)
class Sizes:
    """hidden is no multiple of a block; experts no multiple of a share."""

    hidden: int = 112
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    top_k: int = 4
    vocab: int = 300

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def packed(self) -> int:
        """Outputs of the QKV projection."""
        return self.query + 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class DenseInputs:
    """Makes the arguments of a dense operation, by the name of its mode: random float32, rounded to the role's dtype.

    delta: with the sum of the layer before. edges: with padding rows, ties, NaN, and router logits that rounding
    cannot reorder; benchmarks go without.
    """

    generator: torch.Generator
    roles: Mapping[str, str]
    rows: int
    sizes: Sizes
    delta: bool = True
    edges: bool = True

    def of(self, operation: Operation) -> dict[str, Any]:
        return getattr(self, operation.mode)()

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def _normal(self, *shape: int, std: float = 1.0, role: str = "hidden") -> torch.Tensor:
        return (self._floats(*shape) * std).to(getattr(torch, self.roles[role]))

    def _matrix(self, out: int, inputs: int) -> torch.Tensor:
        return self._normal(out, inputs, std=inputs**-0.5, role="weight")

    def _stream(self, rows: int) -> dict[str, Any]:
        """A residual stream, always float32, and the norm after it."""
        hidden = self.sizes.hidden
        return {
            "residual": self._floats(rows, hidden) * 2.0,
            "delta": self._normal(rows, hidden) if self.delta else None,
            "norm_weight": self._floats(hidden) * 0.3 + 1.0,
            "eps": EPS,
        }

    def qkv(self) -> dict[str, Any]:
        """The last of many rows are padding, with keys that are not stored; slots in any order; any angles, with a
        scale as YaRN's."""
        sizes, stream = self.sizes, self._stream(self.rows)
        return {
            **stream,
            "weight": self._matrix(sizes.packed, sizes.hidden),
            "bias": self._normal(sizes.packed, std=0.5),
            **self._turned(),
        }

    def rotate_write(self) -> dict[str, Any]:
        """As `qkv`, with slots of -1, as in a graph's padding, and one of 0."""
        made = self._turned()
        slots = made["metadata"].slot_mapping
        slots[:1] = 0
        if len(slots) > 2 and self.edges:
            slots[1::3] = -1
            slots[-1] = made["key_cache"][..., 0, 0].numel() - 1
        return {"qkv": self._normal(self.rows, self.sizes.packed, role="qkv"), **made}

    def _turned(self) -> dict[str, Any]:
        rows, sizes, device = self.rows, self.sizes, self.generator.device
        real = rows if rows < 3 or not self.edges else rows - 2
        blocks = max(BLOCKS, rows)
        angle = torch.rand(64, sizes.head_dim // 2, generator=self.generator, device=device) * 6.28
        shape = (2, blocks, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
        caches = torch.full(shape, UNTOUCHED, dtype=getattr(torch, self.roles["kv"]), device=device)
        slots = 1 + torch.randperm(blocks * BLOCK_SIZE - 2, generator=self.generator, device=device)[:real]
        return {
            "cos_sin": torch.cat((angle.cos(), angle.sin()), -1) * 1.3,
            "positions": torch.randint(1, 64, (rows,), generator=self.generator, device=device),
            "key_cache": caches[0],
            "value_cache": caches[1].clone(),
            "metadata": one_key_each(slots),
        }

    def output(self) -> dict[str, Any]:
        hidden, query = self.sizes.hidden, self.sizes.query
        return {
            "attended": self._normal(self.rows, query),
            "weight": self._matrix(hidden, query),
            "bias": self._normal(hidden, std=0.5),
            "residual": self._floats(self.rows, hidden) * 2.0 if self.delta else None,
        }

    def router(self) -> dict[str, Any]:
        """Keeps the rows with the largest gaps between the chosen logits: rounding must not change the choice."""
        rows, sizes = self.rows, self.sizes
        drawn = self._stream(12 * rows if self.edges else rows)
        weight = self._normal(sizes.experts, sizes.hidden, std=2 * sizes.hidden**-0.5, role="weight")
        made = {**drawn, "weight": weight, "bias": self._normal(sizes.experts), "top_k": sizes.top_k}
        if not self.edges:
            return made
        stream = drawn["residual"] + (drawn["delta"].float() if self.delta else 0.0)
        normed = stream / (stream.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * drawn["norm_weight"]
        values = (normed @ weight.float().T + made["bias"].float()).sort(-1, descending=True).values
        gaps = (values[:, :-1] - values[:, 1:])[:, : sizes.top_k].amin(-1)
        kept = gaps.topk(rows).indices
        live = torch.ones(rows, dtype=torch.int32)
        if rows > 2:
            live[-1] = 0
        delta = drawn["delta"][kept] if self.delta else None
        return {**made, "residual": drawn["residual"][kept], "delta": delta, "live": live}

    def add_norm(self) -> dict[str, Any]:
        """The first row is small, so that epsilon counts."""
        stream = self._stream(self.rows)
        for name in ("residual", "delta"):
            if stream[name] is not None:
                stream[name][0] *= 1e-3
        return {**stream, "dtype": getattr(torch, self.roles["hidden"])}

    def logits(self) -> dict[str, Any]:
        hidden = self.sizes.hidden
        return {"normed": self._normal(self.rows, hidden), "weight": self._matrix(self.sizes.vocab, hidden)}

    def token(self) -> dict[str, Any]:
        """Logits are whole numbers below 256, which bfloat16 holds: all kernels have the same ones. Many are near the
        largest, in every other row it comes twice, and one row holds NaN."""
        rows, hidden, vocab = self.rows, self.sizes.hidden, self.sizes.vocab
        weight = (25 * self._normal(vocab, hidden, role="weight")).round().clamp(-80, 80)
        normed = self._normal(rows, hidden)
        normed = torch.where(normed.abs() >= normed.abs().topk(3).values[:, -1:], normed.sign(), 0.0)
        if self.edges:
            best = (normed[::2].float() @ weight.float().T).argmax(-1)
            weight[(best + vocab // 3) % vocab] = weight[best]
            normed[1:2, 0] = math.nan
        noise = (16 * self._floats(rows, vocab)).round() / 8 if self.delta else None
        return {"normed": normed, "weight": weight, "noise": noise}

    def greedy(self) -> dict[str, Any]:
        """Equal largest logits in some rows, tokens that a grammar forbids, NaN and Inf."""
        rows, ninth = self.rows, self.sizes.vocab // 9
        drawn = self._normal(rows, self.sizes.vocab, role="logits")
        if self.edges:
            for row in range(0, rows, 2):
                drawn[row, [ninth * 8, ninth * 5, ninth * 7]] = 9.0
            for row, value in zip(range(1, rows, 3), (math.nan, math.inf), strict=False):
                drawn[row, ninth * 6] = value
            drawn[2::5, : ninth * 7] = drawn[2::5, ninth * 7 + 1 :] = -math.inf
            drawn[10:11] = -math.inf
        return {"logits": drawn}
