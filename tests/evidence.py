"""Pages that name tests, files and commands as evidence: what they name must be there.

Evidence is code between backticks:

    tests/moe/test_ascend.py::test_name     a test, in that file; test_name[case_…] a case for a device
    test_name, case_name                    a test or a case, somewhere below tests/
    docs/performance.md                     a file of the repository (test_name.py also somewhere below tests/)
    npu-gptoss verify --mutate              a command with options that it takes
    make test-cuda                          a target of the Makefile
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from functools import cache
from pathlib import Path

from tests.docs.parsing import objection as command_objection

ROOT = Path(__file__).resolve().parent.parent


def spans(text: str) -> list[str]:
    """What stands between single backticks, outside of fenced blocks, once each."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return sorted(set(re.findall(r"`([^`\n]+)`", prose)))


@cache
def functions(path: Path | None = None) -> frozenset[str]:
    """Names of the functions in a file of tests, without one in all of them."""
    paths = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("*/tests/**/*.py")] if path is None else [path]
    trees = (ast.parse(each.read_text(encoding="utf-8")) for each in paths)
    return frozenset(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def objection(span: str) -> str | None:
    """What is wrong with a piece of evidence, None if it is there. What cannot be told for evidence is wrong."""
    if node := re.fullmatch(r"((?:\w+/)?tests/[\w/]+\.py)::(test_\w+)(?:\[(case_\w+)\])?", span):
        return _node(*node.groups())
    if re.fullmatch(r"(test|case)_\w+", span):
        return None if span in functions() else f"there is no {span} in tests/"
    words = shlex.split(span)
    if words[0] == "npu-gptoss":
        return command_objection(span)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        return None if words[1] in targets else f"the Makefile has no {words[1]}"
    if len(words) == 1 and re.fullmatch(r"[\w./-]+\.(py|sh|md|json|\w*Dockerfile)", span):
        return _file(span)
    return "neither a test, a file, a command nor a target of the Makefile"


def objections(text: str) -> dict[str, str]:
    """All evidence of a text that is not there, with what is wrong."""
    return {span: wrong for span in spans(text) if (wrong := objection(span))}


def looks_like_tests(text: str) -> list[str]:
    """The evidence of a text that names tests or files of tests; in prose other code stands between backticks too."""
    return [span for span in spans(text) if re.match(r"((\w+/)?tests/|(test|case)_\w+)", span)]


def _node(file: str, test: str, case: str | None) -> str | None:
    if not (ROOT / file).is_file():
        return f"there is no {file}"
    if test not in functions(ROOT / file):
        return f"{file} has no {test}"
    return None if case is None or case in functions() else f"there is no {case} in tests/"


def _file(name: str) -> str | None:
    path = ROOT / name
    if re.fullmatch(r"([\w/]*/)?test_\w+\.py", name):
        found = path.is_file() or list((ROOT / "tests").rglob(name.removeprefix("tests/")))
        return None if found else f"there is no {name}"
    if not path.is_file():
        return f"there is no {name}"
    return None if not name.endswith(".sh") or os.access(path, os.X_OK) else f"{name} cannot be executed"
