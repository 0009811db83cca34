"""Repairs of vllm-ascend's runner on a stand-in: they apply to its release and to gpt-oss only.

Their effect on the real runner is tested on the emulated 910B.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from npu_gptoss.serving import compat
from npu_gptoss.serving.ascend import captured, full_graph
from npu_gptoss.serving.compat.server import metrics
from npu_gptoss.serving.compat.start import ascend
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER
from npu_gptoss.serving.releases import ascend_0_23


class ACLGraphWrapper:
    def __init__(self, model: object) -> None: ...


def stand_in(update: str = "update_attn_params") -> SimpleNamespace:
    """vllm-ascend's module with the code that the installers look for; records the calls. update: names the function
    of 0.11 or of 0.23 that updates lengths."""
    called: list[Any] = []

    def update_attn_params(update_stream: Any, forward_context: Any, runtime_shape: int, kv: Any = None) -> None:
        called.append(("update", update_stream, forward_context, runtime_shape, kv))

    def update_full_graph_params(
        attn_backend: Any, update_stream: Any, forward_context: Any, num_tokens: int, config: Any = None
    ) -> None:
        called.append(("update", attn_backend, update_stream, forward_context, num_tokens, config))

    class NPUModelRunner:
        def __init__(self, vllm_config: Any, device: Any) -> None:
            called.append(("init", vllm_config, device))

        def _make_attention_mask(self, seq_lens: Any, position: Any, attn_state: Any) -> Any:
            return {"seq_lens": seq_lens, "position": position, "attn_state": attn_state}

        def _generate_process_reqs_hidden_states(self, forward_context: Any) -> None:
            update_attn_params(self.update_stream, forward_context, 1)

        def _update_full_graph_params_if_needed(self, forward_context: Any, num_tokens_padded: int) -> None:
            update_full_graph_params(
                self.attn_backend, self.update_stream, forward_context, num_tokens_padded, self.vllm_config
            )

        def _determine_batch_execution_and_padding(
            self, num_reqs: int, use_cascade_attn: bool, force_uniform_decode: bool | None = None
        ) -> Any:
            num_tokens_padded, has_encoder_output, dispatch_cudagraph = num_reqs, False, self.dispatch
            return dispatch_cudagraph(num_tokens_padded, use_cascade_attn or has_encoder_output)

        def load_model(self) -> None:
            self.model = ACLGraphWrapper(self.model)

        def _dummy_sampler_run(self, hidden_states: Any) -> Any:
            hidden_states = hidden_states[: self.max_num_reqs]
            return self.model.compute_logits(hidden_states)

        def _check_and_update_cudagraph_mode(self) -> None:
            self.compilation_config.resolve_cudagraph_mode_and_sizes(self.uniform_decode_query_len)
            self.cudagraph_dispatcher.initialize_cudagraph_keys(self.compilation_config.cudagraph_mode, 0)

        def _calc_spec_decode_metadata(self, cu_num_draft_tokens: torch.Tensor) -> Any:
            return SimpleNamespace(cu_num_draft_tokens=cu_num_draft_tokens)

        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            batch_descriptor = scheduler_output
            self.aclgraph_dispatcher.dispatch(batch_descriptor)

    updates = {each.__name__: each for each in (update_attn_params, update_full_graph_params)}
    return SimpleNamespace(
        NPUModelRunner=NPUModelRunner, called=called, __name__=ASCEND_RUNNER, **{update: updates[update]}
    )


def test_unsupported_vllm_ascend_gets_no_repair(monkeypatch) -> None:
    module = stand_in()
    before = dict(vars(module.NPUModelRunner)), dict(vars(module))
    mask = next(patch for patch in compat.patches() if patch.name == "ascend-host-mask")
    with monkeypatch.context() as context:
        context.setattr(compat, "_status", {})
        context.setattr(compat, "version_objection", lambda release: "vllm-ascend 0.12.0rc1: another")
        compat._install(mask, module)
        assert compat._status[mask].state == "skipped"
        assert compat._status[mask].detail == "vllm-ascend 0.12.0rc1: another"
    assert (dict(vars(module.NPUModelRunner)), dict(vars(module))) == before


def runner_of(module: SimpleNamespace, model_type: str) -> Any:
    runner = object.__new__(module.NPUModelRunner)
    runner.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    return runner


def test_other_models_keep_their_mask() -> None:
    module = stand_in()
    ascend.install_host_mask(module)
    asked = {"seq_lens": [3], "position": [0, 1, 2], "attn_state": "prefill"}
    assert runner_of(module, "qwen3")._make_attention_mask(**asked) == asked
    assert runner_of(module, "gpt_oss")._make_attention_mask(**asked) is None


class Taken(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    bytes_ = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.bytes_ += made.nbytes
        return made


def test_the_kv_cache_leaves_room_to_sample_a_full_batch_with_drafts() -> None:
    """vllm-ascend takes the memory of the logits for that of sampling: on an emulated card 16 requests ended it."""
    module, taken = stand_in(), {}
    ascend.install_sampler_memory(module)
    for model_type, drafts in (("qwen3", 3), ("gpt_oss", 0), ("gpt_oss", 3)):
        runner = runner_of(module, model_type)
        runner.max_num_reqs, runner.model = 16, SimpleNamespace(compute_logits=lambda states: states)
        runner.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
        )
        logits = torch.empty(16, 1000, device="meta")
        with Taken() as count:
            assert len(runner._dummy_sampler_run(logits)) == 16
        taken[model_type, drafts] = count.bytes_ / logits.nbytes - 1
    assert taken["qwen3", 3] == 0
    assert taken["gpt_oss", 0] >= 11, "what 16 requests with a top_p took, emulated"
    assert taken["gpt_oss", 3] >= taken["gpt_oss", 0] + 9, "and three drafts of each"


def test_steps_of_other_models_are_not_observed() -> None:
    module, answer = stand_in(), (SimpleNamespace(name="NONE"), None)
    metrics.install_report(module)
    for model_type, observed in (("qwen3", False), ("gpt_oss", True)):
        runner, dispatched = runner_of(module, model_type), []
        runner.aclgraph_dispatcher = SimpleNamespace(dispatch=lambda step, seen=dispatched: seen.append(step) or answer)
        step = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"request": 1}, num_tokens=1)
        runner.execute_model(step)
        assert dispatched == [step]
        assert hasattr(runner, metrics.OBSERVER) is observed


@pytest.mark.parametrize(
    ("update", "given"),
    [
        ("update_attn_params", ("stream", "context", 8, "transfer")),
        ("update_full_graph_params", ("backend", "stream", "context", 8, "config")),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_other_models_keep_their_updates(ours, update, given, monkeypatch):
    """Graphs hold our calls for gpt-oss only; vllm-ascend updates the lengths of other models."""
    module, seen = stand_in(update), []
    ascend.install_full_graph(module)
    monkeypatch.setattr(captured, "update_step", lambda *given: seen.append(given) or ours)
    getattr(module, update)(*given)
    assert seen == [("stream", "context", 8)]
    assert module.called == ([] if ours else [("update", *given)])


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("real", [True, False])
def test_steps_that_do_not_fit_a_call_leave_full_graphs_on_0_23(real, fits):
    runner, asked = stand_in().NPUModelRunner("config", "npu:0"), []
    runner.optimistic_seq_lens_cpu = torch.tensor([300, 7, 999])
    runner.dispatch = lambda rows, disable_full: "piecewise" if disable_full else "full"
    ascend_0_23.guard(runner, lambda lengths: asked.append(lengths) or fits)
    forced = {} if real else {"force_uniform_decode": True}
    chosen = runner._determine_batch_execution_and_padding(num_reqs=2, use_cascade_attn=False, **forced)
    assert chosen == ("full" if fits or not real else "piecewise")
    assert asked == ([(300, 7)] if real else [])


@pytest.mark.parametrize("update", ascend.UPDATES)
def test_full_graphs_are_tried_before_the_runner_is_constructed(update, monkeypatch):
    module = stand_in(update)
    ascend.install_full_graph(module)
    monkeypatch.setattr(full_graph, "prepare", lambda *given: module.called.append(("prepare", *given)))
    monkeypatch.setattr(full_graph, "guard", lambda runner: module.called.append(("guard", runner)))
    runner = module.NPUModelRunner("config", "npu:0")
    assert module.called == [("prepare", "config", "npu:0"), ("init", "config", "npu:0"), ("guard", runner)]


@pytest.mark.parametrize(
    ("model_type", "method", "modes", "sizes"),
    [
        ("gpt_oss", "ngram", {"full", "piecewise"}, [1, 2, 3, 6]),
        ("gpt_oss", "ngram", {"full"}, [3, 6]),
        ("gpt_oss", "ngram", {"piecewise"}, [3, 6]),
        ("gpt_oss", "eagle3", {"full", "piecewise"}, [3, 6]),
        ("gpt_oss", None, {"full", "piecewise"}, [3, 6]),
        ("qwen3", "ngram", {"full", "piecewise"}, [3, 6]),
    ],
)
def test_a_lone_row_is_padded_to_a_request_with_drafts(model_type, method, modes, sizes):
    """Pieces for fewer rows than a request with all drafts; graphs of whole steps have none."""
    module, told = stand_in(), []
    ascend.install_draft_sizes(module)
    runner = runner_of(module, model_type)
    mode = SimpleNamespace(
        **{f"has_{each}_cudagraphs": lambda each=each: each in modes for each in ("full", "piecewise")}
    )
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 6])
    compilation.resolve_cudagraph_mode_and_sizes = lambda each: setattr(compilation, "cudagraph_capture_sizes", [3, 6])
    runner.compilation_config, runner.uniform_decode_query_len = compilation, 3
    runner.speculative_config = method and SimpleNamespace(method=method)
    keys = SimpleNamespace(
        initialize_cudagraph_keys=lambda *given: told.append((*given, compilation.cudagraph_capture_sizes))
    )
    runner.cudagraph_dispatcher = keys
    runner._check_and_update_cudagraph_mode()
    assert compilation.cudagraph_capture_sizes == sizes
    assert told == [(mode, 0, [3, 6]), (mode, 3, sizes)][: 1 + (len(sizes) > 2)]


def test_memory_beside_the_ends_of_drafts_is_read_on_a_card():
    """A tile of Triton's begins before the first number and ends behind the last."""
    module = stand_in()
    ascend.install_draft_ends(module)
    ends = torch.arange(1, 6, dtype=torch.int32)
    found = runner_of(module, "gpt_oss")._calc_spec_decode_metadata(ends).cu_num_draft_tokens
    assert found.tolist() == ends.tolist()
    assert found.storage_offset() * found.itemsize == 32, "as aligned as before"
    assert found.untyped_storage().nbytes() // found.itemsize - found.storage_offset() >= 2 * len(ends) + 96
