"""vLLM's cache of compiled graphs, whose manager is a fake; tests/serving/compat/test_compat.py finds the real one."""

from __future__ import annotations

import ast
import os
import types
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.serving.compat.start import compile_cache


@pytest.fixture
def manager() -> Any:
    class CompilerManager:
        def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
            self.cache_dir, self.cache = cache_dir, {}
            self.cache_file_path = os.path.join(cache_dir, "vllm_compile_cache.py")  # noqa: PTH118
            if prefix == "broken":
                raise ValueError("another reason")
            if prefix == "raced" and Path(self.cache_file_path).exists():
                Path(self.cache_file_path).unlink()
                raise SyntaxError("cut")
            if Path(self.cache_file_path).exists():
                with Path(self.cache_file_path).open() as f:
                    self.cache = dict(ast.literal_eval(f.read()))

        def load(self, graph: Any, example_inputs: Any, graph_index: int, compile_range: Any) -> Any:
            return compile(graph, "graph", "eval")

    compile_cache.install(types.SimpleNamespace(CompilerManager=CompilerManager))
    return CompilerManager()


@pytest.mark.parametrize("content", ["{ (1, 'x'", "7", ""])
def test_cut_list_of_compiled_graphs_ends_each_start(tmp_path: Path, manager: Any, content: str) -> None:
    (tmp_path / compile_cache.FILE).write_text("{1: 2}")
    manager.initialize_cache(str(tmp_path), prefix="x")
    assert manager.cache == {1: 2}
    (tmp_path / compile_cache.FILE).write_text(content)
    manager.initialize_cache(str(tmp_path), disable_cache=False, prefix="x")
    assert manager.cache == {}
    with pytest.raises(ValueError, match="another reason"):
        manager.initialize_cache(str(tmp_path), prefix="broken")


def test_a_second_server_that_removes_the_cut_list_ends_this_start(tmp_path: Path, manager: Any) -> None:
    (tmp_path / compile_cache.FILE).write_text("{")
    manager.initialize_cache(str(tmp_path), prefix="raced")
    assert manager.cache == {}


def test_cut_graph_ends_each_start(tmp_path: Path, manager: Any) -> None:
    manager.initialize_cache(str(tmp_path))
    assert eval(manager.load("1 + 1", [], 0, None)) == 2
    assert manager.load("(1 +", [], 0, None) is None
