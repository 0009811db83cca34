"""What this stack cannot do for gpt-oss is refused in words before anything is served."""

from __future__ import annotations

import pytest

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
