"""The table of operators: schemas bind like torch's dispatcher, and code cannot drift from them."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator import context
from ascend_emulator.context import OpContext, current, set_default, use
from ascend_emulator.ops import OPS, SCHEMAS
from ascend_emulator.ops.table import kernel, poison_, poisoned


def test_every_operator_stands_under_its_schemas_name_and_overload():
    for name, schema in SCHEMAS.items():
        parsed = torch._C.parse_schema(schema)
        assert name == parsed.name + (f".{parsed.overload_name}" if parsed.overload_name else "")
    assert OPS.keys() == SCHEMAS.keys()


def test_a_function_that_differs_from_its_schema_is_refused_at_definition():
    for schema in (
        "npu::made_up(Tensor x, int k=2) -> Tensor",  # another default
        "npu::made_up(Tensor x, *, int k=1) -> Tensor",  # keyword only
        "npu::made_up(Tensor y, int k=1) -> Tensor",  # another name
    ):
        with pytest.raises(TypeError, match="first difference"):

            @kernel(schema)
            def made_up(x: torch.Tensor, k: int = 1) -> torch.Tensor:
                return x

    assert "npu::made_up" not in OPS


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError):
        OPS["npu::npu_swiglu"](torch.zeros(2, 2), alpha=1)
    with pytest.raises(TypeError):
        OPS["npu::npu_fused_infer_attention_score_v2"](*[torch.zeros(1)] * 3, window=1)


def test_poison_is_wrong_everywhere():
    like = torch.zeros(2)
    assert poisoned((2,), like).isnan().all()
    assert (poisoned((2,), like, torch.int32) < -(2**30)).all()
    assert poison_(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()


def test_contexts_nest_and_know_their_version():
    assert current() == OpContext()
    with use(cann="8.5", strict=False) as outer, use(capturing=True) as inner:
        assert (inner.cann, inner.strict, inner.capturing) == ("8.5", False, True)
        assert not inner.is_8_3
        assert outer.findings is inner.findings
    assert current().is_8_3
    with pytest.raises(ValueError, match="8\\.3\\.rc1, 8\\.3\\.rc2, 8\\.5"):
        OpContext(cann="8.2")


def test_the_default_context_reaches_code_that_enters_none():
    before = context._default
    try:
        set_default(OpContext(cann="8.5"))
        assert current().cann == "8.5"
    finally:
        set_default(before)
