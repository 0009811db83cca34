"""Options that this stack cannot serve are refused in words at the start."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import EAGER, FULL, SPOILT, WORKSPACE, right, turn


def ending(serve, rounds=(), **how) -> str:
    """The output of an engine that did not come to serve."""
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve(list(rounds), **how)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpu_memory_utilization": 0.001}, "of the 4 MiB that --gpu-memory-utilization 0.001 takes of 4.0 GiB."),
        ({"gpu_memory_utilization": 0.15, "max_model_len": 131_072}, "of KV cache for one request of 131072 tokens = "),
    ],
    ids=["no block", "no request"],
)
def test_too_little_memory_is_reported_before_weights_load(options, sentence, serve):
    """vLLM reports it after minutes, unless the load runs out of memory first."""
    said = ending(serve, options=options, variables={"VLLM_LOGGING_LEVEL": "INFO"})
    assert "weights and one request do not fit: " in said
    assert sentence in said
    assert "Loading model weights took" not in said


def test_blocks_that_attention_does_not_read_are_refused_in_words(serve):
    """vllm-ascend sets 128, but not under its own scheduler; R29 would end the first request."""
    scheduler = {"ascend_scheduler_config": {"enabled": True}}
    how = {"block_size": 64, "enable_prefix_caching": False, "enable_chunked_prefill": False}
    said = ending(serve, options={**how, "max_num_batched_tokens": 2048, "additional_config": scheduler})
    assert "--block-size 64: " in said


def test_the_slow_experts_are_refused_before_a_capture_fails(serve):
    """They ask the device how many rows each expert has (107027 while capturing); in eager mode they serve."""
    how = {"variables": {"NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}}
    said = ending(serve, [turn(SPOILT)], **how)
    assert "npu-gptoss cannot serve this. " in said
    assert "NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops: " in said
    assert "107027" not in said
    results, _ = serve([turn(SPOILT)], options=EAGER, **how)
    assert isinstance(results[0], list)


def test_asynchronous_scheduling_is_refused_with_graphs_and_serves_without(serve, expected):
    how = {"async_scheduling": True, "distributed_executor_backend": "mp"}  # vLLM needs a separate process for it
    said = ending(serve, options=how)
    assert "--async-scheduling: " in said
    rounds = [turn(SPOILT), turn(SPOILT, seed=2)]
    results, _ = serve(rounds, options=how | EAGER)
    assert right(rounds, results, expected) == [True, True]


def test_the_slow_experts_are_refused_where_tokens_travel(serve):
    """They would sum only this rank's tokens."""
    variables = {"NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}
    said = ending(serve, options=EAGER, spoil="by_all_to_all", variables=variables)
    assert "works where every rank sees all tokens, and this step goes by AlltoAllCommImpl; unset NPU_GPTOSS" in said


def test_the_slow_router_serves_with_graphs(serve, expected):
    """Its ids are int64, which CANN's dispatch refuses (R59) unless they are converted."""
    rounds = [turn(SPOILT)]
    results, printed = serve(rounds, variables={"NPU_GPTOSS_KERNEL_MOE_ROUTE": "small_ops"})
    assert right(rounds, results, expected) == [True]
    assert "mixed prefill-decode, PIECEWISE" in printed


@pytest.mark.parametrize(("cann", "machine"), [("8.3", WORKSPACE), pytest.param("9.1", {}, marks=pytest.mark.long)])
def test_another_attention_is_not_passed_over_by_full_graphs(cann, machine, serve_on, expected):
    """A full decode graph always holds CANN's operator, so it is not captured. vllm-ascend has prepared it by then."""
    rounds, variables = [turn(SPOILT)], {"NPU_GPTOSS_KERNEL_ATTENTION_PAGED": "small_ops"}
    results, printed = serve_on(cann)(rounds, options=FULL, machine=machine, variables=variables)
    assert right(rounds, results, expected) == [True]
    assert "FULL_DECODE_ONLY does not work here (attention runs attention.paged.small_ops, and a full" in printed
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert "decode, FULL" not in printed
