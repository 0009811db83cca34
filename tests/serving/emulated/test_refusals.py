"""What this stack cannot do for gpt-oss is refused in words before anything is served."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import SPOILT, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "float16"}, "--dtype float16: gpt-oss runs in bfloat16 on npu; use --dtype bfloat16."),
        ({"dtype": "float32"}, "--dtype float32: gpt-oss runs in bfloat16 on npu; use --dtype bfloat16."),
        ({"quantization": "ascend"}, "--quantization ascend: the checkpoint says whether it is MXFP4 or BF16;"),
        ({"additional_config": {"kv_cache_dtype": "int8"}}, "--additional-config kv_cache_dtype: the KV cache has the"),
    ],
)
def test_what_this_stack_cannot_do_is_refused_in_words(options, sentence, serve):
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve([], options={"dtype": "bfloat16", **options}, machine={"diagnostic_fp32": False})
    assert "npu-gptoss cannot serve this. " in str(refusal.value)
    assert sentence in str(refusal.value)


def ending(serve, rounds=(), **how) -> str:
    """What was printed by an engine that did not come to serve."""
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve(list(rounds), **how)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpu_memory_utilization": 0.001}, "No available memory for the cache blocks."),
        (
            {"gpu_memory_utilization": 0.1, "max_model_len": 131_072},
            "To serve at least one request with the models's max seq len (131072), (",
        ),
    ],
    ids=["no block", "no request"],
)
def test_too_little_memory_for_the_cache_is_said_by_vllm(options, sentence, serve):
    assert sentence in ending(serve, options=options)


def test_the_slow_experts_cannot_be_captured(serve):
    """They ask the device how many rows each expert has; in eager mode they serve."""
    how = {"variables": {"NPU_GPTOSS_KERNEL_MOE_EXPERTS": "small_ops"}}
    assert "error code is 107027" in ending(serve, [turn(SPOILT)], **how)
    results, _ = serve([turn(SPOILT)], options={"enforce_eager": True}, **how)
    assert isinstance(results[0], list)
