"""The sentences that the code says when something is wrong: templates of errors and warnings, read from the source.

A template is the text with `…` where the program puts a value in: f"{name} came twice" is "… came twice".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOLE = "…"
LOGGED = ("warning", "warning_once", "error", "exception")
LISTED = "listed"  # a sentence of a table of objections: (whether it holds, the sentence)


@dataclass(frozen=True)
class Message:
    """`raised` is the class of an error as the source names it, "log" for a warning, or LISTED."""

    path: Path
    line: int
    raised: str
    template: str


def template(node: ast.expr) -> str:
    """Of an expression that makes a text; a hole for whatever is not written in the source."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(template, values))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return template(left) + template(right)
    return HOLE


def tidy(text: str) -> str:
    """Holes side by side are one; a message of several lines is one line."""
    return re.sub(rf"({HOLE}\s*)*{HOLE}", HOLE, re.sub(r"\s+", " ", text)).strip()


def fragments(text: str) -> list[str]:
    """What is written between the holes, white space aside."""
    return [part for part in map(str.strip, tidy(text).split(HOLE)) if part]


def holds(parts: list[str], text: str) -> bool:
    """Whether all parts stand in the text, in this order."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def messages_of(path: Path) -> Iterator[Message]:
    """What a module raises, logs as a warning or error, or lists as an objection."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[first, *_])):
                yield Message(path, node.lineno, name, tidy(template(first)))
            case ast.Call(func=ast.Attribute(attr=attr, value=ast.Name(id="logger")), args=[first, *_]):
                if attr in LOGGED:
                    yield Message(path, node.lineno, "log", tidy(re.sub(r"%[sdr]", HOLE, template(first))))
            case ast.Tuple(elts=[ast.Compare() | ast.BoolOp() | ast.Call() | ast.Attribute(), *_, last]):
                text = tidy(template(last))
                if " " in text:
                    yield Message(path, node.lineno, LISTED, text)


def templates_of(path: Path) -> Iterator[str]:
    """Every text that a module writes, whatever becomes of it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = tidy(re.sub(r"%[sdr]", HOLE, template(node)))
            if text.strip(HOLE):
                yield text
