"""A child's answers are not mixed with what else it prints, and one that is silent or dead is told by its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from research.children import Child

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from research.children import inside
hear, say = inside()
print("a library's own line")
{rest}
"""


def child(tmp_path: Path, rest: str) -> Child:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(__file__).resolve().parents[2]), rest=rest))
    return Child("one", [sys.executable, str(program)], tmp_path / "log", {"WHOSE": "child's"})


def test_answers_come_in_turn_and_other_lines_are_in_the_log(tmp_path):
    one = child(tmp_path, "import os\nwhile True: say([hear(), os.environ['WHOSE']])")
    assert one.ask({"a": 1}, 60) == [{"a": 1}, "child's"]
    assert one.ask(2, 60) == [2, "child's"]
    one.end()
    assert "a library's own line" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "rest", ["raise ValueError('out of memory')", "import time; sys.stderr.write('out of memory'); time.sleep(60)"]
)
def test_a_child_that_dies_or_is_silent_is_told_by_the_end_of_its_log(tmp_path, rest):
    one = child(tmp_path, rest)
    with pytest.raises(RuntimeError, match=r"(?s)one: no answer.*out of memory"):
        one.ask("anything", 3)
    one.end()
