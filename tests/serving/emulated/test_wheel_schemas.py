"""Every operator of torch_npu that this package calls exists in the real wheels as it is called and as it is emulated.

Two wheels are read, 2.7.1 (installed in the emulated environment) and 2.7.1.post2 (beside it, not installed): their
libraries hold the schemas as text. The calls are collected from our sources.
"""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ascend_emulator.ops import SCHEMAS

from emulator.tests.machine import venv

pytestmark = pytest.mark.emulated

PACKAGE = Path(__file__).resolve().parents[3] / "npu_gptoss"
SOURCES = [
    *(PACKAGE / name for name in ("attention/ascend.py", "moe/ascend.py", "moe/expert_format.py")),
    *sorted([*PACKAGE.glob("selftest/*.py"), *PACKAGE.glob("serving/ascend/*.py")]),
]
FIRST, SECOND = "2.7.1", "2.7.1.post2"
ATB = "_npu_reshape_and_cache"
# called only where the wheel has it (moe/ascend.py asks)
NOT_IN_FIRST = {"npu_clipped_swiglu"}
NO_OPERATORS = {"npu", "get_npu_format"}  # torch_npu's own Python, and what tells of a tensor without computing
SCHEMA = re.compile(rb"(?<=\0)\w+(?:\.\w+)?\([ -~]*\) -> [ -~]+(?=\0)")


@dataclass(frozen=True)
class Use:
    """One call in our sources: the operator with its overload, how many positional arguments, which keywords."""

    operator: str
    positional: int
    keywords: tuple[str, ...]
    place: str


def keys_of_call_arguments() -> tuple[str, ...]:
    """The keywords that `**call_arguments(...)` stands for."""
    tree = ast.parse((PACKAGE / "attention/ascend.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "call_arguments")
    returned = next(n.value for n in ast.walk(function) if isinstance(n, ast.Return))
    assert isinstance(returned, ast.Dict)
    return tuple(ast.literal_eval(key) for key in returned.keys if key is not None)


def names_after_torch_npu(function: ast.expr) -> list[str]:
    """`torch_npu.a.b` -> [a, b]; [] for anything else."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.insert(0, function.attr)
        function = function.value
    return names if isinstance(function, ast.Name) and function.id == "torch_npu" else []


def collect() -> list[Use]:
    uses = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = names_after_torch_npu(node.func) if isinstance(node, ast.Call) else []
            if not names or names[0] in NO_OPERATORS:
                continue
            keywords: list[str] = []
            for keyword in node.keywords:  # all of our ** hold call_arguments
                keywords += [keyword.arg] if keyword.arg else keys_of_call_arguments()
            place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            uses.append(Use(".".join(names), len(node.args), tuple(keywords), place))
    return uses


USES = collect()
OPERATORS = sorted({use.operator for use in USES})


def libraries(version: str) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of the libraries that register operators."""
    names = ("libtorch_npu.so", "libop_plugin_atb.so")
    if version == FIRST:
        folder = next(venv().glob("lib/python3.*/site-packages/torch_npu/lib"))
        yield from ((name, (folder / name).read_bytes()) for name in names)
        return
    wheels = list((venv() / "ascend-emulator/wheels").glob(f"torch_npu-{version}-*.whl"))
    assert wheels, f"the wheel of torch-npu {version} is not there: run make setup-emulated"
    with zipfile.ZipFile(wheels[0]) as wheel:
        yield from ((name, wheel.read(f"torch_npu/lib/{name}")) for name in names)


@functools.cache
def schemas(version: str) -> dict[str, str]:
    """Operator with overload -> schema, as registered by the wheel, and under ATB what it has of that one's."""
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
    assert set(OPERATORS) == {
        "_npu_fused_infer_attention_score_v2_get_max_workspace",
        "_npu_reshape_and_cache",
        "npu_add_rms_norm",
        "npu_clipped_swiglu",
        "npu_format_cast",
        "npu_fused_infer_attention_score_v2.out",
        "npu_grouped_matmul",
        "npu_moe_gating_top_k_softmax",
        "npu_moe_init_routing_v2",
        "npu_moe_token_unpermute",
        "npu_rms_norm",
        "npu_swiglu",
    }
    text = "".join(path.read_text() for path in SOURCES)
    assert "torch.ops.npu." not in text, "calls by another way would not be collected"


@pytest.mark.parametrize("version", [FIRST, SECOND])
def test_the_wheels_text_is_read(version: str) -> None:
    assert len(schemas(version)) > 250


@pytest.mark.parametrize("version", [FIRST, SECOND])
@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.operator}-{use.place}")
def test_every_call_fits_the_wheels_schema(use: Use, version: str) -> None:
    if use.operator in NOT_IN_FIRST and version == FIRST:
        assert use.operator not in schemas(version)
        return
    whole = emulated(ATB) if use.operator == ATB else schemas(version)[use.operator]
    known = arguments(parsed(whole))
    names = [name for name, *_ in known]
    positional = [name for name, _, keyword_only, _ in known if not keyword_only][: use.positional]
    assert len(positional) == use.positional
    given = {*positional, *use.keywords}
    # Python gives both outputs of an .out form in one list
    outputs = {name for name, *_ in known[-2:]} if use.operator.endswith(".out") else set()
    unknown = given - set(names) - ({"out"} if outputs else set())
    required = {name for name, _, _, default in known if default == "required"} - outputs
    assert unknown == set(), f"{use.place} gives what torch-npu {version} does not take"
    assert required - given == set(), f"{use.place} does not give what torch-npu {version} wants"


@pytest.mark.parametrize("version", [FIRST, SECOND])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_emulated_is_the_wheels_schema(operator: str, version: str) -> None:
    """Names, types, order, defaults. 2.7.1.post2 may have further arguments behind those that 2.7.1 has."""
    if operator in NOT_IN_FIRST and version == FIRST:
        return
    if operator == ATB:
        assert emulated(operator).partition("::")[2].startswith(schemas(version)[ATB])
        assert schemas(FIRST)["symbol"] == schemas(SECOND)["symbol"], "its C++ signature"
        return
    ours, theirs = arguments(parsed(emulated(operator))), arguments(parsed(schemas(version)[operator]))
    assert ours == theirs


def test_a_changed_schema_would_be_seen() -> None:
    name = "npu_moe_gating_top_k_softmax"
    changed = schemas(FIRST)[name].replace("int k=1", "int k=2")
    assert changed != schemas(FIRST)[name]
    assert arguments(parsed(changed)) != arguments(parsed(emulated(name)))
