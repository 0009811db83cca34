"""The worker: gpt-oss by the offline engine's model, over the blocks that vLLM's scheduler hands out.

Penalties, biases, lists of tokens and log-probabilities of prompts are not computed. With several ranks each computes
all, and vLLM takes the first one's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.engine.kv_cache import allocate_kv_caches
from npu_gptoss.engine.request import SamplingParams, TokenLogprobs
from npu_gptoss.engine.sampling import choose, report, uniform
from npu_gptoss.engine.scheduler import Chunk
from npu_gptoss.harmony.library import load_encoding
from npu_gptoss.model.transformer import GptOss

CACHE_BYTES = 1 << 28
TEXT_TOKENS = 199998  # of the vocabulary; control tokens follow


@dataclass(eq=False)
class Request:
    token_ids: list[int]
    block_ids: list[int]
    params: SamplingParams
    seed: int


@dataclass
class Step:
    names: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    logits: torch.Tensor | None = None  # behind the last row of each chunk, [chunks, vocab] float32


class Worker(WorkerBase):
    """What vLLM's engine asks of a worker."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.requests: dict[str, Request] = {}
        self.step = Step()

    def load_model(self, **_: Any) -> None:
        with kernels_for(self.device):
            self.model = GptOss.load(self.model_config.model, self.device, torch.float32)
        library = load_encoding()
        self.blanks = torch.tensor([token for token in range(TEXT_TOKENS) if library.decode([token]).isspace()])

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        config = self.model.config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            dtype=torch.float32,
        )
        return {f"model.layers.{layer}": spec for layer in range(config.num_hidden_layers)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, *_: Any) -> None:
        """The caches have one layout."""

    def determine_available_memory(self) -> int:
        return CACHE_BYTES

    def initialize_from_config(self, config: Any) -> None:
        size = self.cache_config.block_size
        self.caches = allocate_kv_caches(self.model.config, config.num_blocks, size, torch.float32, self.device)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """Answers the other calls of a start, a pause and an end: there is nothing to do."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None

    @torch.inference_mode()
    def execute_model(self, scheduled: Any) -> ModelRunnerOutput | None:
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        starts = self._begun(scheduled.scheduled_new_reqs) | self._going_on(scheduled.scheduled_cached_reqs)
        self.step = step = Step()
        for name, count in scheduled.num_scheduled_tokens.items():
            step.names.append(name)
            step.chunks.append(Chunk(self.requests[name], starts[name], starts[name] + count))
        if not step.chunks:
            return ModelRunnerOutput([], {})
        with kernels_for(self.device):
            batch = pack(step.chunks, self.cache_config.block_size, self.device)
            hidden = self.model.forward(batch.input_ids, batch.positions, self.caches, batch.metadata)
            ends = [
                first + chunk.end - chunk.start - 1 for first, chunk in zip(batch.first_rows, step.chunks, strict=True)
            ]
            step.logits = self.model.logits(hidden[ends])
        return None

    def _begun(self, new: Any) -> dict[str, int]:
        for one in new:
            asked = one.sampling_params
            params = SamplingParams(
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=max(0, asked.top_k),
                seed=asked.seed,
                logprobs=asked.logprobs,
            )
            tokens = list(one.prefill_token_ids or one.prompt_token_ids)
            seed = hash(one.req_id) if asked.seed is None else asked.seed
            (blocks,) = one.block_ids
            self.requests[one.req_id] = Request(tokens, list(blocks), params, seed)
        return {one.req_id: one.num_computed_tokens for one in new}

    def _going_on(self, cached: Any) -> dict[str, int]:
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            its = self.requests[name]
            if name in cached.resumed_req_ids:
                its.block_ids.clear()
            its.block_ids += blocks[0] if blocks is not None else ()
        return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    @torch.inference_mode()
    def sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        names, chunks, logits = self.step.names, self.step.chunks, self.step.logits
        if grammar is not None:
            self._hold(grammar, logits)
        requests = [chunk.request for chunk in chunks]
        draws = [uniform(one.seed, len(one.token_ids)) for one in requests]  # by position, as vLLM's own runner
        chosen = choose(logits, [one.params for one in requests], draws)
        counts = [one.params.logprobs for one in requests]
        logprobs = None
        if any(count is not None for count in counts):
            logprobs = _logprobs(report(logits, chosen, [max(filter(None, counts), default=0)] * len(counts)))
        sampled: list[list[int]] = []
        for chunk, token in zip(chunks, chosen.tolist(), strict=True):
            sampled.append([token] if chunk.samples else [])
            chunk.request.token_ids += sampled[-1]
        return ModelRunnerOutput(
            names, {name: row for row, name in enumerate(names)}, sampled_token_ids=sampled, logprobs=logprobs
        )

    def _hold(self, grammar: Any, logits: torch.Tensor) -> None:
        """Holds rows to their grammars. So small a model loses itself in white space where a grammar allows any amount:
        two tokens of it in succession are not chosen."""
        import xgrammar

        for name, bits in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True):
            row = self.step.names.index(name)
            xgrammar.apply_token_bitmask_inplace(logits[row : row + 1], torch.from_numpy(bits)[None])
            others = logits[row].index_fill(0, self.blanks, -torch.inf)
            if self.requests[name].token_ids[-1] in self.blanks and others.isfinite().any():
                logits[row] = others


def _logprobs(entries: list[TokenLogprobs]) -> LogprobsLists:
    """A row for each request, as vLLM slices them."""
    rows = [[(entry.token_id, entry.logprob), *entry.top] for entry in entries]
    ids = np.array([[token for token, _ in row] for row in rows])
    values = np.array([[value for _, value in row] for row in rows], dtype=np.float32)
    ranks = [1 + sum(value > entry.logprob for _, value in entry.top) for entry in entries]
    return LogprobsLists(ids, values, np.array(ranks), None)
