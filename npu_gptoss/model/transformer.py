"""gpt-oss as a plain, inference-only transformer on the public attention, dense and MoE ops.

The maths is that of transformers' `GptOssForCausalLM` (eager attention). In bfloat16 it rounds less: the residual
stream and RoPE are computed in float32 (docs/accuracy.md). Router logits are a linear layer in the model's dtype, as
there. Requests of one step are packed along the token axis; keys and values live in paged caches
(`npu_gptoss.attention`). Weights are frozen dataclasses (`weights.py`), put together by `assembly.py`.

A step is `embed`, then for each layer `enter`, `attend` and `leave`, then `finish`. What lies between two attentions is
one piece: graphs are captured around attention or over all of it, from the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from npu_gptoss import dense
from npu_gptoss.attention import LayerKernels, StepMetadata, paged_attention
from npu_gptoss.dense.operations import ADD_NORM, LOGITS, OUTPUT, QKV, ROUTER, TOKEN
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound
from npu_gptoss.kernels.signature import dtype_name
from npu_gptoss.model.assembly import AUTO, FLOATS, FP8, assemble, expert_format
from npu_gptoss.model.checkpoint import expand_stream, iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import accounted
from npu_gptoss.model.memory import check_memory
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.rope import cos_sin_cache
from npu_gptoss.model.weights import ModelWeights
from npu_gptoss.moe import expert_mlp

DTYPES = (torch.float32, torch.bfloat16)

KVCache = tuple[torch.Tensor, torch.Tensor]  # keys, values: [num_blocks, block_size, kv_heads, head_dim] each


def check_dtype(dtype: torch.dtype) -> None:
    """Refuses dtypes that cannot hold gpt-oss's activations."""
    if dtype == torch.float16:
        raise InputError(
            "float16 cannot hold gpt-oss's activations (they overflow beyond 65504): use bfloat16, or float32 on a CPU",
            field="dtype",
        )
    if dtype not in DTYPES:
        raise InputError(
            f"gpt-oss runs in {' or '.join(map(dtype_name, DTYPES))}, got {dtype_name(dtype)}", field="dtype"
        )


class GptOss:
    """The weights on one device and the forward pass over them."""

    form: str  # the experts' format on the device (`assembly.expert_format`)

    def __init__(self, config: GptOssConfig, weights: ModelWeights, ranks: Ranks | None = None) -> None:
        """ranks: the group that shares the model; config and weights are then this rank's share. None: no sharing."""
        self.config, self.weights, self.ranks = config, weights, ranks
        self.embedding, self.layers = weights.embedding, weights.layers
        self.norm, self.lm_head = weights.norm, weights.lm_head
        self.cos_sin = cos_sin_cache(config, config.max_position_embeddings, torch.float32, self.device)
        dtype = self.dtype
        size = dtype, config.head_dim  # of the cache
        self._qkv = [dense.bound(QKV, dtype, each.attention.qkv_weight, *size) for each in self.layers]
        self._attention = [LayerKernels(each.attention.window) for each in self.layers]
        self._output = [dense.bound(OUTPUT, dtype, each.attention.output_weight) for each in self.layers]
        self._router = [dense.bound(ROUTER, dtype, each.moe.router_weight) for each in self.layers]
        self._add_norm, self._logits = dense.bound(ADD_NORM, dtype), dense.bound(LOGITS, dtype, self.lm_head)
        self._token = dense.bound(TOKEN, dtype, self.lm_head)
        self.shortlist: dense.Shortlist | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def bounds(self) -> list[Bound]:
        """The kernels of the operations whose calls differ in their rows."""
        experts = [each.moe.experts.bound for each in self.layers]
        return [*self._qkv, *self._output, *self._router, *experts, self._add_norm, self._logits, self._token]

    @property
    def heads(self) -> int:
        """Query heads, of this rank."""
        return self.config.num_attention_heads

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @classmethod
    def load(
        cls,
        directory: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        *,
        progress: bool = True,
        ranks: Ranks | None = None,
        weights: str = AUTO,
    ) -> GptOss:
        """Reads a checkpoint in the BF16 or the MXFP4 layout. Every parameter must be filled exactly once.

        ranks: keeps this rank's share only.
        weights: the experts' format on the device, one of `assembly.WEIGHTS`.
        """
        check_dtype(dtype)
        config = GptOssConfig.from_directory(Path(directory))
        tensors = iterate_tensors(directory, config, dtype=dtype, progress=progress)
        if torch.device(device).type == "cpu" and ranks is None:
            check_memory(config, dtype, directory)
        return cls.from_tensors(config, tensors, device, dtype, ranks=ranks, weights=weights)

    @classmethod
    def from_tensors(
        cls,
        config: GptOssConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        device: str | torch.device,
        dtype: torch.dtype,
        *,
        ranks: Ranks | None = None,
        weights: str = AUTO,
    ) -> GptOss:
        """Builds the model from a stream of (official name, tensor) in the BF16 or the MXFP4 layout, in any order.

        config and tensors describe the whole model on every rank. ranks, weights: as in `load`.
        """
        form, expert_map = expert_format(config, weights, dtype), None
        tensors = accounted(tensors, config, "the model's tensors", expanded=True)
        if form == FLOATS:
            tensors = expand_stream(tensors, dtype)
        if ranks is not None:
            expert_map = ranks.shard.expert_map(config, torch.device(device))
            config, tensors = ranks.shard.local(config), ranks.shard.cut_all(tensors)
        made = cls(config, assemble(config, tensors, device, dtype, expert_map, fp8=form == FP8), ranks)
        made.form = form
        return made

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: StepMetadata,
        live: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over the packed tokens of all requests: writes their keys and values, returns normed hidden states.

        input_ids, positions [rows] int64 on the model's device, rows >= metadata.num_tokens (the rest is padding and
        influences nothing); kv_caches one pair a layer; live as in `leave`.

        Returns [rows, hidden] in the model's dtype.
        """
        residual, delta = self.embed(input_ids), None
        for index, kv_cache in enumerate(kv_caches):
            residual, query = self.enter(index, residual, delta, positions, kv_cache, metadata)
            attended = self.attend(index, query, kv_cache, metadata)
            residual, delta = self.leave(index, residual, attended, live)
        return self.finish(residual, delta)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [rows] -> the residual stream [rows, hidden]."""
        return F.embedding(input_ids, self.embedding)

    def enter(
        self,
        index: int,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: StepMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer `index` up to its attention: the residual stream and the queries [rows, heads, head_dim]."""
        weights = self.layers[index].attention
        return dense.qkv(
            residual,
            delta,
            weights.norm,
            self.config.rms_norm_eps,
            weights.qkv_weight,
            weights.qkv_bias,
            self.cos_sin,
            positions,
            *kv_cache,
            metadata,
            kernel=self._qkv[index],
        )

    def attend(
        self,
        index: int,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: StepMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of layer `index`, [rows, heads, head_dim], into `out` where given."""
        weights = self.layers[index].attention
        _, kernel = self._attention[index].of(query, kv_cache[0], weights.sinks)
        return paged_attention(
            query,
            *kv_cache,
            metadata,
            weights.sinks,
            scale=self.config.head_dim**-0.5,
            sliding_window=weights.window,
            out=out,
            kernel=kernel,
        )

    def leave(
        self, index: int, residual: torch.Tensor, attended: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer `index` from its attention on: the residual stream, and what is still to be added to it.

        live: [rows], 0 for rows that are padding; no expert is read for them.
        """
        attention, moe = self.layers[index].attention, self.layers[index].moe
        heads, kernel = attended.flatten(1), self._output[index]
        if self.ranks is None and len(heads) == 1:
            # a matrix-vector product adds the residual for nothing, a matrix product needs another launch for it
            residual = dense.output(heads, attention.output_weight, attention.output_bias, residual, kernel=kernel)
            delta = None
        else:
            delta = self._sum(dense.output(heads, attention.output_weight, attention.output_bias, kernel=kernel))
        residual, normed, topk_weights, topk_ids = dense.router(
            residual,
            delta,
            moe.norm,
            self.config.rms_norm_eps,
            moe.router_weight,
            moe.router_bias,
            self.config.num_experts_per_tok,
            live=live,
            kernel=self._router[index],
        )
        return residual, self._sum(expert_mlp(normed, moe.experts, topk_weights, topk_ids))

    def _sum(self, share: torch.Tensor) -> torch.Tensor:
        """Over the ranks, where there are any."""
        return share if self.ranks is None else self.ranks.sum(share)

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new residual stream, and the normed rows [rows, hidden]."""
        return dense.add_norm(residual, delta, weight, self.config.rms_norm_eps, self.dtype, kernel=self._add_norm)

    def finish(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The normed hidden states [rows, hidden]."""
        return self.add_norm(residual, delta, self.norm)[1]

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> logits [rows, vocab] in the model's dtype, into `out` where given."""
        if self.ranks is None:
            return dense.logits(hidden, self.lm_head, out=out, kernel=self._logits)
        return self.ranks.side_by_side(dense.logits(hidden, self.lm_head, kernel=self._logits), out)

    @property
    def token_rows(self) -> int:
        """The most rows for which `token` is faster than `head`: where a kernel reads a shortlist, and no rank has only
        a part of the vocabulary."""
        most, kernel = self._token.ranges[0]
        return most if self.ranks is None and kernel.kernel.solution == "shortlist" else 0

    def keep_shortlist(self) -> None:
        """Makes what `token` reads, half of lm_head's size, or makes it again from other weights."""
        if self.shortlist is not None:
            self.shortlist.write(self.lm_head)
        elif self.token_rows:
            self.shortlist = dense.Shortlist.of(self.lm_head)

    @torch.inference_mode()
    def token(self, hidden: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> [rows] int64, the token of the largest logit, with noise [rows,
        vocab] float32 added where given; -1 for a row that is not finite. Needs `keep_shortlist`."""
        assert self.shortlist is not None, "keep_shortlist was called"
        return dense.token(hidden, self.lm_head, self.shortlist, noise, kernel=self._token)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head` in float32."""
        return self.head(hidden).float()
