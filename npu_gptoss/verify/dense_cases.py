"""Test inputs of the rest of a layer: projections, norms, router and the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.kernels import Operation
from npu_gptoss.verify.attention_cases import one_key_each

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
        """Makes inputs as `qkv` does, with slots of -1, as in a graph's padding, and one of 0."""
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
            # oneDNN with AMX lets the first values of a row reach the row before where `hidden % 32` is not 0
            normed[1:2, -1 if hidden % 32 else 0] = math.nan
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
