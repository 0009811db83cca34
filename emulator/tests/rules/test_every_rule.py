"""The table of rules is complete, and each operator rule has a test that triggers it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from ascend_emulator.context import CANN_VERSIONS, use
from ascend_emulator.rules import RULES, SOURCES, Call, ContractError, Kind, Layer

DROPPED = {52, 60, 62, 63, 64, 69, 74, 78, 79}
OPERATOR_RULES = {*range(1, 81), 92, 93, 94} - DROPPED
UNDEFINED = {24, 33, 38, 46, 91, 92, 93}
COSTLY = {35}
ONLY_8_3 = {7, 18, 25, 27, 34, 37, 59, 66, 72, 88, 90}


def test_each_rule_has_a_sentence():
    assert RULES.keys() == set(range(1, 95)) - DROPPED
    for rule in RULES.values():
        assert rule.text.endswith(".")
        assert set(rule.versions) <= set(CANN_VERSIONS)
    assert {n for n, r in RULES.items() if r.kind is Kind.UNDEFINED} == UNDEFINED
    assert {n for n, r in RULES.items() if r.kind is Kind.COSTLY} == COSTLY
    of_release = {version: {n for n, r in RULES.items() if version in r.versions} for version in CANN_VERSIONS}
    assert of_release["8.3.rc2"] - of_release["8.5"] == ONLY_8_3
    assert (of_release["8.5"] - of_release["8.3.rc2"], of_release["8.5"] - of_release["9.0"]) == ({92}, {5, 91})
    assert (of_release["9.0"] - of_release["8.5"], of_release["9.0"] - of_release["9.1"]) == ({93}, {92})


def test_each_rule_of_some_releases_only_has_a_source():
    assert {n for n, rule in RULES.items() if rule.versions != CANN_VERSIONS} <= SOURCES.keys() <= RULES.keys()


def test_each_operator_rule_is_triggered_by_its_own_test():
    """In a table of broken calls, or by `rejects(n)` or `notes(n)` in a test that is named for the rule."""
    triggered: set[int] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        triggered |= getattr(importlib.import_module(f"{__package__}.{path.stem}"), "BROKEN", {}).keys()
        for test in ast.parse(path.read_text()).body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_R"):
                calls = (node for node in ast.walk(test) if isinstance(node, ast.Call))
                named = (call for call in calls if getattr(call.func, "id", "") in ("rejects", "notes"))
                assert {call.args[0].value for call in named} == {int(test.name[6:8])}, test.name
                triggered.add(int(test.name[6:8]))
    assert triggered >= OPERATOR_RULES


def test_a_rule_of_one_version_does_not_hold_on_another():
    with use(cann="8.5"):
        Call.of("op").reject(25, "nothing")
    with pytest.raises(ContractError, match=r"call aclnnOp failed, error code is 561002.*\n.*one two \[R25\]"):
        Call.of("op", "aclnnOp").reject(25, "one two", Layer.TILING)
