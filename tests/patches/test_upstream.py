"""`patches/vllm-ascend-0.23.0`: what the newest release still lacks."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_gptoss.attention.window import keys_before
from tests.patches import trees

WINDOW = 128
UNLIMITED = 2**31 - 1


def windows_asked_for(source: Path) -> list[int]:
    """`pre_tokens` of every call and assignment of a file, for a layer whose window is 128 keys."""
    names = {"self": SimpleNamespace(sliding_window=WINDOW), "sliding_window": WINDOW, "SWA_INT_MAX": UNLIMITED}
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.keyword(arg="pre_tokens", value=value):
                pass
            case ast.Assign(targets=[ast.Name(id="pre_tokens")], value=value):
                pass
            case _:
                continue
        if not isinstance(value, ast.Name):  # else the assignment is what counts
            found.append(eval(compile(ast.Expression(value), str(source), "eval"), names))
    return found


@pytest.mark.slow
def test_window_keeps_128_keys_not_129(newest_ascend: Path, tmp_path: Path) -> None:
    """The operator's band does not count the query's own key."""
    (diff,) = trees.PATCHES.glob("vllm-ascend-0.23.0/*.diff")
    file = trees.changed_file(diff)
    assert windows_asked_for(newest_ascend / file) == [WINDOW] * 7
    repaired = trees.copied(newest_ascend, tmp_path / "copy", diff)
    assert windows_asked_for(repaired / file) == [keys_before(WINDOW)] * 7 == [127] * 7
