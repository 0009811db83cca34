"""Mutations of a kernel's source: one operator, number, function or statement changed at a time.

`verify --mutate` computes the answer of a mistaken kernel; these are mistaken kernels. A mutation without an effect has
its reason in `EQUIVALENT`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
}
FUNCTIONS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}


@dataclass(frozen=True)
class SourceMutation:
    """name: the line's own text, before and after. source: of the whole kernel."""

    name: str
    source: str


def source_mutations(source: str) -> Iterator[SourceMutation]:
    """Each in a copy of the function; text of decorators, docstrings and argument lists stays."""
    tree = ast.parse(source)
    places = [n for statement in tree.body[0].body for n in ast.walk(statement)]
    seen = {source}
    for place, node in enumerate(places):
        if _mutated(copy.deepcopy(node)) is None:
            continue
        changed = copy.deepcopy(tree)
        target = [n for statement in changed.body[0].body for n in ast.walk(statement)][place]
        _mutated(target)
        text = ast.unparse(changed)
        if text not in seen:
            seen.add(text)
            pairs = zip(ast.unparse(tree).splitlines(), text.splitlines(), strict=True)
            before, after = next((old.strip(), new.strip()) for old, new in pairs if old != new)
            yield SourceMutation(f"{before}  ->  {after}", text)


def _mutated(node: ast.AST) -> ast.AST | None:
    """The node, changed in place; None where there is nothing to change."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        node.op = OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
        node.attr = FUNCTIONS[node.attr]
    else:
        return None
    return node


# (kernel, change) -> the reason why it computes the same
_TILES = "for tile in range(tl.program_id(0), tiles, tl.num_programs({})):"
_TOKENS = "for token in range(tl.program_id(0), tokens, tl.num_programs({})):"
_REPEATS = "each program repeats the work of all others: right, and that many times slower, which no result shows"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("expand_kernel", f"{_TILES.format(0)}  ->  {_TILES.format(1)}"): _REPEATS,
    ("rotate_write_kernel", f"{_TOKENS.format(0)}  ->  {_TOKENS.format(1)}"): _REPEATS,
}
