from __future__ import annotations

import torch

from npu_gptoss.kernels.signature import accepts, signature


def test_torch_dtypes_and_names_mean_the_same():
    assert signature(query=torch.bfloat16, kv="float32") == signature(kv=torch.float32, query="bfloat16")


def test_reasons_name_role_wanted_and_got():
    takes = accepts(query=("bfloat16", "float32"), sinks=torch.bfloat16)
    assert takes.reasons_against(signature(query="float32", sinks="bfloat16")) == []
    assert takes.reasons_against(signature(query="float16", sinks="float32")) == [
        "needs bfloat16 or float32 query, got float16",
        "needs bfloat16 sinks, got float32",
    ]


def test_a_role_that_is_not_passed_is_a_reason():
    assert accepts(sinks="bfloat16").reasons_against(signature(query="bfloat16")) == ["needs bfloat16 sinks, got none"]
