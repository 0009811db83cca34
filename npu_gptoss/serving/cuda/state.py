"""Model hooks of vLLM's second runner, besides the forward pass.

At batch 1 a step is host-bound, so unused metadata is not built: none for a step that replays one graph, and no counts
or gathers for a step that samples one token per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from npu_gptoss import dense
from npu_gptoss.serving.releases.vllm import CUDAGraphMode, DefaultModelState, Sampler, SamplerOutput, gumbel_sample

# From this many rows on our kernels pick greedy tokens: on an H100 vLLM's take 51 us at 32 rows and 75 at 128. With
# fewer rows the host is the limit, and ours need two launches.
GREEDY_ROWS = 8


class StepState(DefaultModelState):
    """vLLM's state for a model whose attention reads the step from fixed buffers (`cache.StepBuilder`)."""

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """Skips the metadata if the step replays a graph, which reads the buffers of its capture. Builds it if drafts
        are verified (they are spread over rows), for a connector of caches and for half batches (`ubatch_idx`)."""
        config = self.vllm_config
        unread = config.speculative_config is None and config.kv_transfer_config is None and not more
        if unread and not for_capture and cudagraph_mode == CUDAGraphMode.FULL:
            return {}
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **more,
        )

    def custom_sampler(self, sampler: Any) -> tuple[Any, None] | None:
        """Returns None, for vLLM's sampler, if drafts are verified or tokens are watermarked."""
        if type(sampler) is not Sampler or self.vllm_config.speculative_config is not None:
            return None
        return PlainSampler.of(sampler), None


class PlainSampler(Sampler):
    """vLLM's sampler with a shortcut for decode steps whose requests need only tokens."""

    _plain: bytes | None  # the requests, by row, of the last step that took the shortcut
    _greedy: bool  # True if all of these are greedy
    _counts: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, sampler: Sampler) -> PlainSampler:
        """Copies a sampler with its state."""
        made = cls.__new__(cls)
        vars(made).update(vars(sampler), _plain=None, _greedy=False, _counts={})
        return made

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Resets the shortcut: a request's options change only here."""
        self._plain = None
        super().add_request(req_idx, sampling_params)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        rows = input_batch.num_reqs
        one_each = rows == input_batch.num_tokens == logits.shape[0] and not input_batch.has_prefill
        if not one_each or not self._wants_tokens_only(input_batch.idx_mapping_np):
            return super().__call__(logits, input_batch)
        states = self.sampling_states
        if self._greedy and rows >= GREEDY_ROWS:
            sampled = dense.greedy(logits).clamp_(min=0)  # vLLM has no value for a row that is not finite
        else:
            sampled = gumbel_sample(
                logits,
                input_batch.expanded_idx_mapping,
                states.temperature.gpu,
                states.seeds.gpu,
                input_batch.positions[:rows],
                apply_temperature=False,
                is_drafting=False,
                use_fp64=self.use_fp64_gumbel,
            )
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
            self._greedy = bool((states.temperature.np[requests] == 0.0).all())
        return plain
