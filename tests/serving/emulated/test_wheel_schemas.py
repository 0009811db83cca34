"""The emulated operators that this package calls have the schemas of the real wheels, which hold them as text.

A call that does not fit such a schema fails in every test of the emulated 910B. Two wheels are read: 2.7.1, which the
emulated environment has installed, and 2.7.1.post2; of an operator that neither has, the wheel for CANN 9.1.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ascend_emulator.launch import Machine
from ascend_emulator.ops import SCHEMAS

from emulator.tests.machine import venv
from npu_gptoss.kernels.platform import OPERATORS as OPERATORS_OF_SOME

PACKAGE = Path(__file__).resolve().parents[3] / "npu_gptoss"
SOURCES = [
    *(PACKAGE / name for name in ("attention/ascend.py", "moe/ascend.py", "moe/expert_format.py")),
    *sorted([*PACKAGE.glob("verify/self_test/*.py"), *PACKAGE.glob("serving/ascend/*.py")]),
]
FIRST, SECOND, THIRD = "2.7.1", "2.7.1.post2", "2.10.0"
ATB = "_npu_reshape_and_cache"
NOT_IN_FIRST = {"npu_clipped_swiglu"}  # moe/ascend.py checks that the wheel has it
ONLY_IN_THIRD = set(OPERATORS_OF_SOME)  # features of the platform
SCHEMA = re.compile(rb"(?<=\0)\w+(?:\.\w+)?\([ -~]*\) -> [ -~]+(?=\0)")
OPERATORS = sorted(
    {name for path in SOURCES for name in re.findall(r"torch_npu\.(\w*npu_\w+(?:\.out)?)\(", path.read_text())}
    - {"get_npu_format"}
)


def libraries(version: str) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of the libraries that register operators."""
    where = "ascend-emulator/second" if version == SECOND else "lib/python3.*/site-packages"
    folders = list(venv(Machine("9.1") if version == THIRD else None).glob(f"{where}/torch_npu/lib"))
    assert folders, f"torch-npu {version} is not there: run make setup-emulated"
    yield from ((name, (folders[0] / name).read_bytes()) for name in ("libtorch_npu.so", "libop_plugin_atb.so"))


@functools.cache
def schemas(version: str) -> dict[str, str]:
    """Operator with overload -> schema, as registered by the wheel; under ATB the part that the wheel has."""
    found = {}
    for name, contents in libraries(version):
        for text in SCHEMA.findall(contents):
            found[text.decode().partition("(")[0]] = text.decode()
        if name == "libop_plugin_atb.so":
            # the compiler has put the end of this string into an instruction
            found[ATB] = re.search(rb"(?<=\0)" + ATB.encode() + rb"\([ -~]{60,}?slot_indic", contents)[0].decode()
            symbol = rb"_ZN3atb22_npu_reshape_and_cache\w+(?=\0)"
            found["symbol"] = re.search(symbol, contents)[0].decode()
    return found


def parsed(text: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(text)


def emulated(operator: str) -> str:
    return next(schema for name, schema in SCHEMAS.items() if name.partition("::")[2] == operator)


def arguments(schema: torch._C.FunctionSchema) -> list[tuple[str, str, bool, object]]:
    return [
        (a.name, str(a.type), a.kwarg_only, a.default_value if a.has_default_value() else "required")
        for a in schema.arguments
    ]


def test_the_calls_of_all_operators_are_found() -> None:
    assert {"npu_fused_infer_attention_score_v2.out", "npu_grouped_matmul", ATB, *NOT_IN_FIRST} <= set(OPERATORS)
    assert len(OPERATORS) == 13
    assert "torch.ops.npu." not in "".join(path.read_text() for path in SOURCES), "this would not be collected"


@pytest.mark.parametrize("version", [FIRST, SECOND])
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_emulated_operator_has_the_schema_of_the_wheel(operator: str, version: str) -> None:
    """Compares names, types, order, and defaults."""
    if operator in NOT_IN_FIRST and version == FIRST:
        assert operator not in schemas(version)
        return
    if operator in ONLY_IN_THIRD:
        assert operator not in schemas(version)
        version = THIRD
    if operator == ATB:
        assert emulated(operator).partition("::")[2].startswith(schemas(version)[ATB])
        assert schemas(FIRST)["symbol"] == schemas(SECOND)["symbol"], "its C++ signature"
        return
    ours, theirs = arguments(parsed(emulated(operator))), arguments(parsed(schemas(version)[operator]))
    assert ours == theirs
