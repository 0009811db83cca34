"""Repairs of vllm-ascend's model runner, for gpt-oss only, and of its sampler. Replacements are in `serving/ascend`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import Original, around, either, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER

if TYPE_CHECKING:
    import torch


@repair(
    "ascend-host-mask",
    f"{ASCEND_RUNNER}:NPUModelRunner._make_attention_mask",
    upstream="vllm-ascend 0.12 makes one mask of 2048",
    until="0.23",
)
def install_host_mask(module: ModuleType) -> None:
    """At each prefill vllm-ascend makes a mask of prompt length squared on the host and copies it to the device, for
    attention operators that gpt-oss does not use."""

    @around(module.NPUModelRunner, "_make_attention_mask")
    def _make_attention_mask(original: Original, self: Any, seq_lens: Any, position: Any, attn_state: Any) -> Any:
        if self.model_config.hf_config.model_type == MODEL_TYPE:
            return None
        return original(self, seq_lens=seq_lens, position=position, attn_state=attn_state)


UPDATES = "update_full_graph_params", "update_attn_params"


@repair(
    "ascend-full-graph",
    f"{ASCEND_RUNNER}:{UPDATES[1]} NPUModelRunner.__init__",
    upstream="vllm-ascend PR 9165",
    until="0.33",
)
@repair("ascend-full-graph", f"{ASCEND_RUNNER}:{UPDATES[0]} NPUModelRunner.__init__", releases="0.23", until="0.33")
def install_full_graph(module: ModuleType) -> None:
    """When vllm-ascend replays a graph of whole decode steps, it updates the lengths of its own paged attention only,
    so attention with sinks would repeat the lengths of its capture.

    Updates captured attention calls with sinks; tries the updates before the runner relies on them, and runs the start
    check of everything but attention before the weights take the memory.
    """
    runner, updates = module.NPUModelRunner, either(module, *UPDATES)
    later = updates == UPDATES[0]  # of 0.23: its first argument is the backend
    calls = getattr(runner, "_update_full_graph_params_if_needed" if later else "_generate_process_reqs_hidden_states")
    given = "self.attn_backend, self.update_stream" if later else "self.update_stream"
    expect_parameters(getattr(module, updates), "update_stream", "forward_context")
    expect_source(calls, f"{updates}({given}, forward_context")
    expect_source(runner.load_model, "ACLGraphWrapper(self.model")
    if later:  # `releases.ascend_0_23.guard` replaces it
        decide = runner._determine_batch_execution_and_padding
        expect_parameters(decide, "num_reqs", "use_cascade_attn", "force_uniform_decode")
        expect_source(decide, "dispatch_cudagraph(num_tokens_padded, use_cascade_attn or has_encoder_output)")

    @around(module, updates)
    def update(original: Original, *given: Any, **options: Any) -> None:
        from npu_gptoss.serving.ascend import captured

        if not captured.update_step(*given[later : later + 3]):
            original(*given, **options)

    @around(runner, "__init__")
    def __init__(original: Original, self: Any, vllm_config: Any, device: Any) -> None:
        from npu_gptoss.serving.ascend import full_graph

        full_graph.prepare(vllm_config, device)
        original(self, vllm_config, device)
        full_graph.guard(self)


@repair(
    "ascend-draft-sizes",
    f"{ASCEND_RUNNER}:NPUModelRunner._check_and_update_cudagraph_mode",
    releases="0.23",
    until="vLLM captures sizes of their own for mixed steps (issue 28207)",
)
def install_draft_sizes(module: ModuleType) -> None:
    """With n-grams a lone request without drafts is padded to as many rows as with all; each reads other experts."""
    runner = module.NPUModelRunner
    decide = runner._check_and_update_cudagraph_mode
    expect_source(decide, "resolve_cudagraph_mode_and_sizes(", "initialize_cudagraph_keys(")

    @around(runner, "_check_and_update_cudagraph_mode")
    def _check_and_update_cudagraph_mode(original: Original, self: Any, *given: Any, **options: Any) -> None:
        compilation, drafter = self.compilation_config, self.speculative_config
        asked = list(compilation.cudagraph_capture_sizes or ())
        original(self, *given, **options)
        mode, each = compilation.cudagraph_mode, self.uniform_decode_query_len
        ngrams = drafter is not None and drafter.method == "ngram"  # a head has graphs of its own, for the same sizes
        ours = self.model_config.hf_config.model_type == MODEL_TYPE
        if ours and ngrams and mode.has_full_cudagraphs() and mode.has_piecewise_cudagraphs():
            # vLLM rounds up to whole requests, as full graphs need; of fewer rows there is none
            fewer = [size for size in asked if size < each]
            compilation.cudagraph_capture_sizes = sorted({*fewer, *compilation.cudagraph_capture_sizes})
            self.cudagraph_dispatcher.initialize_cudagraph_keys(mode, each)


# rows of float32 logits that sampling holds at its peak, of a request and of a draft: measured, emulated
OF_A_REQUEST, OF_A_DRAFT = 12, 4


@repair(
    "ascend-sampler-memory",
    f"{ASCEND_RUNNER}:NPUModelRunner._dummy_sampler_run",
    releases="0.23",
    until="vllm-ascend counts it",
)
def install_sampler_memory(module: ModuleType) -> None:
    """No memory is kept for sampling: a full batch with drafts ends the engine."""
    runner = module.NPUModelRunner
    expect_source(runner._dummy_sampler_run, "self.max_num_reqs", "self.model.compute_logits(hidden_states)")

    @around(runner, "_dummy_sampler_run")
    def _dummy_sampler_run(original: Original, self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        import torch

        logits = original(self, hidden_states)
        if self.model_config.hf_config.model_type == MODEL_TYPE:
            drafts = getattr(self.vllm_config.speculative_config, "num_speculative_tokens", 0)
            rows = self.max_num_reqs * (OF_A_REQUEST + OF_A_DRAFT * drafts)
            torch.empty(rows, logits.shape[-1], dtype=torch.float32, device=logits.device)  # vLLM reads the peak
        return logits


@repair(
    "ascend-sampling-noise",
    "vllm_ascend.sample.sampler:random_sample",
    releases="0.23",
    upstream="vllm-ascend PR 13394",
    until="0.33",
)
def install_sampling_noise(module: ModuleType) -> None:
    """A step's noise is drawn on another stream and freed before the step has read it, so that the next step's may
    overwrite it: wrong tokens, also such as top_p or a grammar forbids, and seeds that do not repeat."""
    expect_source(module.random_sample, "npu_stream_switch(global_stream())", ".wait_stream(global_stream()) return")

    @around(module, "random_sample")
    def random_sample(original: Original, probs: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        from vllm.v1.sample.ops.topk_topp_sampler import random_sample  # draws the same, on one stream

        return random_sample(probs, generators)


@repair(
    "ascend-draft-ends",
    f"{ASCEND_RUNNER}:NPUModelRunner._calc_spec_decode_metadata",
    releases="0.23",
    upstream="vllm-ascend PR 16222",
    until="0.33",
)
def install_draft_ends(module: ModuleType) -> None:
    """Kernels that judge drafts read `cu_num_draft_tokens` before its first number and behind its last (their compiler
    makes a load of the whole tile of one with two masks): error 507035 where the card has no memory there."""
    runner = module.NPUModelRunner
    expect_source(runner._calc_spec_decode_metadata, "cu_num_draft_tokens=cu_num_draft_tokens")

    @around(runner, "_calc_spec_decode_metadata")
    def _calc_spec_decode_metadata(original: Original, self: Any, *given: Any, **options: Any) -> Any:
        from torch.nn.functional import pad

        metadata = original(self, *given, **options)
        ends = metadata.cu_num_draft_tokens
        # 32 bytes before, so that it is as aligned; tiles are fewer than twice the requests, and some for each core
        metadata.cu_num_draft_tokens = pad(ends, (8, len(ends) + 96))[8 : 8 + len(ends)]
        return metadata
