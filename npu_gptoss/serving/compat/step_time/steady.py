"""Runs steps that go on with the same requests as two replays (`serving/cuda/steady.py`; vLLM 0.33, V2 runner)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import RUNNER_0_33

STEADY = "_npu_gptoss_steady"


@repair(
    "steady-steps",
    f"{RUNNER_0_33}:GPUModelRunner.capture_model .execute_model .sample_tokens",
    releases="0.33",
    until="vLLM's host takes no longer for a step than a GPU",
)
def install_steady(module: ModuleType) -> None:
    """At every step vLLM makes the inputs anew, also if only the last tokens are new: with one request the GPU waits
    for that."""
    runner = module.GPUModelRunner
    _expect_runner(runner)

    @around(runner, "capture_model")
    def capture_model(original: Original, self: Any, *, profile_only: bool = False) -> int:
        from npu_gptoss.serving.cuda.steady import SteadySteps

        size = original(self, profile_only=profile_only)
        steady = None if profile_only else SteadySteps.of(self)
        if steady is not None:
            steady.capture()
            setattr(self, STEADY, steady)
        return size

    @around(runner, "execute_model")
    def execute_model(original: Original, self: Any, scheduler_output: Any, *more: Any, **options: Any) -> Any:
        steady = vars(self).get(STEADY)
        if steady is None:
            return original(self, scheduler_output, *more, **options)
        served = not any(more) and not options  # no stage of a pipeline, and no dummy
        if served and steady.step(scheduler_output):
            return None
        steady.forget()
        found = original(self, scheduler_output, *more, **options)
        if served:
            steady.remember()
        return found

    @around(runner, "sample_tokens")
    def sample_tokens(original: Original, self: Any, grammar_output: Any) -> Any:
        steady = vars(self).get(STEADY)
        return (steady and steady.output()) or original(self, grammar_output)


def _expect_runner(runner: Any) -> None:
    """Raises Mismatch unless a step reads and writes what `SteadySteps` does."""
    expect_source(
        runner.update_requests,
        "num_computed_tokens_np[req_index] = num_computed_tokens",
        "self.block_tables.append_block_ids( req_index, req_new_block_ids, overwrite=False )",
    )
    expect_source(
        runner.prepare_inputs,
        "prepare_pos_seq_lens( idx_mapping, query_start_loc, self.req_states.num_computed_tokens.gpu, "
        "self.input_buffers.positions, self.input_buffers.seq_lens, )",
        "combine_sampled_and_draft_tokens( self.input_buffers.input_ids, idx_mapping, "
        "self.req_states.last_sampled_tokens,",
    )
    expect_source(
        runner.prepare_attn,
        "self.block_tables.gather_block_tables( input_batch.idx_mapping, "
        "num_reqs_padded=input_batch.num_reqs_after_padding, "
        "num_computed_tokens=self.req_states.num_computed_tokens.gpu, )",
        "self.block_tables.compute_slot_mappings(",
    )
    expect_source(
        runner.execute_model,
        "lora_inputs = self.lora_state.make_lora_inputs( input_batch.req_ids, input_batch.idx_mapping_np, "
        "input_batch.num_scheduled_tokens, ) self._set_active_loras(*lora_inputs)",
    )
    expect_source(
        runner.postprocess_sampled,
        "post_update( idx_mapping, self.req_states.num_computed_tokens.gpu, self.req_states.last_sampled_tokens, "
        "output_bin_counts, sampled_tokens, num_sampled, num_rejected, query_start_loc, "
        "self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu,",
    )
