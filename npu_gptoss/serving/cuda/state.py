"""What vLLM's second runner asks of a model beside its forward pass, by the hooks that it has for models.

One request waits for the host of a step, not for the device, so what nobody reads is not made here: the metadata of a
step that replays one graph, and the counts and gathers of a step that samples one token a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from npu_gptoss import dense
from npu_gptoss.serving.lines.vllm_0_33 import CUDAGraphMode, DefaultModelState, Sampler, SamplerOutput, gumbel_sample

# From so many rows on our kernels pick greedy ones: on an H100 vLLM's takes 51 us at 32 rows and 75 at 128. Fewer
# rows wait for the host, and ours are two launches.
GREEDY_ROWS = 8


class StepState(DefaultModelState):
    """vLLM's, for a model whose attention reads its step from buffers that stay (`cache.StepBuilder`)."""

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
        """A replay reads the buffers that its capture saw. Drafts to verify are spread over rows for it, a connector of
        caches may look at the metadata, and so may half batches (`ubatch_idx`): there it is built."""
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
        """None, vLLM's own, where drafts are verified or tokens watermarked."""
        if type(sampler) is not Sampler or self.vllm_config.speculative_config is not None:
            return None
        return PlainSampler.of(sampler), None


class PlainSampler(Sampler):
    """vLLM's sampler, with a short way through it for a step of decode whose requests want nothing but tokens."""

    _plain: bytes | None  # the requests, by row, of the last step that went the short way
    _greedy: bool  # whether all of these are
    _counts: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, sampler: Sampler) -> PlainSampler:
        """The same, its state included."""
        made = cls.__new__(cls)
        vars(made).update(vars(sampler), _plain=None, _greedy=False, _counts={})
        return made

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """The only place where what a request wants changes."""
        self._plain = None
        super().add_request(req_idx, sampling_params)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        rows = input_batch.num_reqs
        one_each = rows == input_batch.num_tokens == logits.shape[0] and not input_batch.has_prefill
        if not one_each or not self._wants_tokens_only(input_batch.idx_mapping_np):
            return super().__call__(logits, input_batch)
        states = self.sampling_states
        if self._greedy and rows >= GREEDY_ROWS:
            sampled = dense.greedy(logits).clamp_(min=0)  # vLLM has no word for a row that is not finite
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
        """requests: the row of each in the tables. Looked at when one of them is new."""
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
