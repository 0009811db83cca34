"""Model hooks of vLLM's second runner, besides the forward pass.

At batch 1 a step is host-bound, so unused metadata is not built: none for a step that replays one graph, and no counts
or gathers for a step that samples one token per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from npu_gptoss import dense
from npu_gptoss.serving.cuda.noise import gumbel_noise
from npu_gptoss.serving.releases.vllm import CUDAGraphMode, DefaultModelState, Sampler, SamplerOutput, gumbel_sample

# From this many rows on our kernels pick greedy tokens: on an H100 vLLM's take 51 us at 32 rows and 75 at 128. With
# fewer rows the host is the limit, and ours need two launches.
GREEDY_ROWS = 8


class StepState(DefaultModelState):
    """vLLM's state for a model whose attention reads the step from fixed buffers (`cache.StepBuilder`)."""

    _sampler: PlainSampler | None = None

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *of_cache: Any, for_capture: bool = False, **more: Any
    ) -> dict[str, Any]:
        """Skips the metadata if the step replays a graph, which reads the buffers of its capture. Builds it if drafts
        are verified (they are spread over rows), for a connector of caches and for half batches (`ubatch_idx`)."""
        if self._sampler is not None and not for_capture:
            self._sampler.foresee(input_batch)
        config = self.vllm_config
        unread = config.speculative_config is None and config.kv_transfer_config is None and not more
        if unread and not for_capture and cudagraph_mode == CUDAGraphMode.FULL:
            return {}
        return super().prepare_attn(input_batch, cudagraph_mode, *of_cache, for_capture=for_capture, **more)

    def custom_sampler(self, sampler: Any) -> tuple[Any, None] | None:
        """Returns None, for vLLM's sampler, if drafts are verified or tokens are watermarked."""
        if type(sampler) is not Sampler or self.vllm_config.speculative_config is not None:
            return None
        self._sampler = PlainSampler.of(sampler, self.model)
        return self._sampler, None


class PlainSampler(Sampler):
    """vLLM's sampler with a shortcut for decode steps whose requests need only tokens."""

    _plain: bytes | None  # the requests, by row, of the last step that took the shortcut
    greedy: bool  # True if all of these are greedy
    _model: Any
    _counts: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, sampler: Sampler, model: Any = None) -> PlainSampler:
        """Copies a sampler with its state. model: a `cuda.model.GptOssForCausalLM`, to take tokens without logits."""
        made = cls.__new__(cls)
        vars(made).update(vars(sampler), _plain=None, greedy=False, _counts={}, _model=model)
        return made

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Resets the shortcut: a request's options change only here."""
        self._plain = None
        super().add_request(req_idx, sampling_params)

    def foresee(self, input_batch: Any) -> None:
        """Tells the model before a step whether tokens are taken without logits. No grammar may want to mask them."""
        self._model.tokens_only = (
            not input_batch.has_structured_output_reqs
            and self.is_plain(input_batch)
            and self._takes_tokens(input_batch.num_reqs)
        )

    def _takes_tokens(self, rows: int) -> bool:
        model = self._model.gptoss
        return model.shortlist is not None and rows <= model.token_rows and (self.greedy or not self.use_fp64_gumbel)

    def is_plain(self, input_batch: Any) -> bool:
        """Every request decodes one token, and wants nothing else."""
        one_each = input_batch.num_reqs == input_batch.num_tokens and not input_batch.has_prefill
        return one_each and self._wants_tokens_only(input_batch.idx_mapping_np)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """logits: [rows, vocab], or the model's `undecided`."""
        rows, undecided = input_batch.num_reqs, None if self._model is None else self._model.undecided
        if not self.is_plain(input_batch) or rows != len(logits):
            if logits is undecided:
                logits = self._model.gptoss.head(logits)
            return super().__call__(logits, input_batch)
        positions, states = input_batch.positions[:rows], self.sampling_states
        of_requests = states.temperature.gpu, states.seeds.gpu, input_batch.expanded_idx_mapping, positions
        sampled = self.take(logits, *of_requests) if logits is undecided else self._pick(logits, *of_requests)
        if rows not in self._counts:
            ones = input_batch.seq_lens.new_ones(rows)
            self._counts[rows] = ones, torch.zeros_like(ones)
        sampled_each, rejected_each = self._counts[rows]
        return SamplerOutput(
            sampled_token_ids=sampled.view(-1, 1),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=sampled_each,
            num_rejected=rejected_each,
        )

    def take(
        self,
        hidden: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        requests: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """hidden [rows, hidden] of a plain step -> its tokens [rows] int64.

        temperatures, seeds: a value a request; requests [rows]: the request of each row; positions [rows].
        """
        model, rows = self._model.gptoss, len(hidden)
        if not self._takes_tokens(rows):
            return self._pick(model.head(hidden), temperatures, seeds, requests, positions)
        vocab = self._model.config.vocab_size
        noise = None if self.greedy else gumbel_noise(requests, temperatures, seeds, positions, vocab)
        return model.token(hidden, noise).clamp_(min=0)

    def _pick(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        requests: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Does the same from logits [rows, vocab]."""
        if self.greedy and len(logits) >= GREEDY_ROWS:
            return dense.greedy(logits).clamp_(min=0)  # vLLM has no value for a row that is not finite
        return gumbel_sample(
            logits,
            requests,
            temperatures,
            seeds,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.use_fp64_gumbel,
        )

    def _wants_tokens_only(self, requests: np.ndarray) -> bool:
        """requests: each request's row in the tables. Checks them again if one is new."""
        key = requests.tobytes()
        if key == self._plain:
            return True
        states = self.sampling_states
        plain = (
            not (self.compute_nans or self.return_sampling_mask or self.trace_replay_state is not None)
            and not self.needs_logits_processing[requests].any()
            and self.get_logprobs_dims(requests) is None
            and bool((states.top_k.np[requests] == states.vocab_size).all())
            and bool((states.top_p.np[requests] == 1.0).all())
        )
        if plain:
            self._plain = key
            self.greedy = bool((states.temperature.np[requests] == 0.0).all())
        return plain
