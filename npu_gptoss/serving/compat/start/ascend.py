"""Repairs of vllm-ascend's model runner, for gpt-oss only. The replacements are in `serving/ascend`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.ascend.limits import installed, version_objection
from npu_gptoss.serving.compat.patch import Mismatch, around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER


def expect_release() -> None:
    objection = version_objection(installed())
    if objection:
        raise Mismatch(objection)


@repair(
    "ascend-host-mask",
    f"{ASCEND_RUNNER}:NPUModelRunner._make_attention_mask",
    upstream="vllm-ascend 0.12 makes one mask of 2048",
    until="0.23",
)
def install_host_mask(module: ModuleType) -> None:
    """At each prefill vllm-ascend makes a mask of prompt length squared on the host and copies it to the device, for
    attention operators that gpt-oss does not use."""
    expect_release()
    runner = module.NPUModelRunner
    expect_parameters(runner._make_attention_mask, "seq_lens", "position", "attn_state")

    @around(runner, "_make_attention_mask")
    def _make_attention_mask(
        original: Callable[..., Any], self: Any, seq_lens: Any, position: Any, attn_state: Any
    ) -> Any:
        if self.model_config.hf_config.model_type == MODEL_TYPE:
            return None
        return original(self, seq_lens=seq_lens, position=position, attn_state=attn_state)


@repair(
    "ascend-full-graph",
    f"{ASCEND_RUNNER}:update_attn_params NPUModelRunner.__init__",
    upstream="vllm-ascend PR 9165",
    until="0.33",
)
def install_full_graph(module: ModuleType) -> None:
    """When vllm-ascend replays a graph of whole decode steps, it updates the lengths of its own paged attention only,
    so attention with sinks would repeat the lengths of its capture.

    Updates captured attention calls with sinks, and prepares the runner (`_prepare_runner`).
    """
    expect_release()
    runner = module.NPUModelRunner
    expect_parameters(module.update_attn_params, "update_stream", "forward_context", "runtime_shape")
    expect_source(runner._generate_process_reqs_hidden_states, "update_attn_params(self.update_stream, forward_context")
    expect_source(runner.load_model, "ACLGraphWrapper(self.model")

    @around(module, "update_attn_params")
    def update_attn_params(
        original: Callable[..., None], stream: Any, context: Any, rows: int, *more: Any, **options: Any
    ) -> None:
        from npu_gptoss.serving.ascend import captured

        if not captured.update_step(stream, context, rows):
            original(stream, context, rows, *more, **options)

    _prepare_runner(runner)


@repair(
    "ascend-full-graph",
    f"{ASCEND_RUNNER}:update_full_graph_params NPUModelRunner.__init__",
    releases=("0.23",),
    upstream="none: the backend is ours",
    until="0.33",
)
def install_full_graph_0_23(module: ModuleType) -> None:
    """vllm-ascend updates the lengths of captured calls only for the attention backend that it chose itself; gpt-oss's
    layers bring their own.

    Updates captured calls of that backend, and prepares the runner (`_prepare_runner`).
    """
    expect_release()
    runner = module.NPUModelRunner
    expect_parameters(module.update_full_graph_params, "attn_backend", "update_stream", "forward_context", "num_tokens")
    expect_source(
        runner._update_full_graph_params_if_needed,
        "update_full_graph_params(self.attn_backend, self.update_stream, forward_context, num_tokens_padded,",
    )
    expect_source(runner.load_model, "ACLGraphWrapper(self.model")
    decide = runner._determine_batch_execution_and_padding
    expect_parameters(decide, "num_reqs", "use_cascade_attn", "force_uniform_decode")
    expect_source(decide, "dispatch_cudagraph(num_tokens_padded, use_cascade_attn or has_encoder_output)")

    @around(module, "update_full_graph_params")
    def update_full_graph_params(
        original: Callable[..., None], backend: Any, stream: Any, context: Any, rows: int, *more: Any, **options: Any
    ) -> None:
        from npu_gptoss.serving.ascend import captured

        if not captured.update_step(stream, context, rows):
            original(backend, stream, context, rows, *more, **options)

    _prepare_runner(runner)


def _prepare_runner(runner: type) -> None:
    """Tries the updates before the runner relies on them, and runs the start check of everything but attention before
    the weights take the memory."""
    expect_parameters(runner.__init__, "vllm_config", "device")

    @around(runner, "__init__")
    def __init__(original: Callable[..., None], self: Any, vllm_config: Any, device: Any) -> None:
        from npu_gptoss.serving.ascend import full_graph

        full_graph.prepare(vllm_config, device)
        original(self, vllm_config, device)
        full_graph.guard(self)
