"""Foreign text in errors: control characters do not reach a terminal, and long values do not bury the sentence."""

from __future__ import annotations

import pytest

from npu_gptoss.errors import MOST, InputError, printable, quoted, short
from npu_gptoss.kernels.selection import KernelError


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x07", "a\0b", "\x9b2J", "\u202e", "\u2028", "\ud800", "\x7f", "\r", "\n"]
)
def test_terminal_control_characters_are_escaped(text: str) -> None:
    for shown in (printable(text), short(text), quoted(text), str(InputError(f"a name {text}"))):
        assert shown.isprintable()
        shown.encode()


def test_readable_text_stays() -> None:
    for text in ("naïve café", "你好\u3000", "a\xa0b", "plain"):
        assert printable(text) == text
    assert str(KernelError("no kernel:\n  one").at("here")) == "here: no kernel:\n  one"
    assert quoted("x") == "'x'"
    assert quoted(["sliding_attention", 1]) == "['sliding_attention', 1]"


@pytest.mark.parametrize(
    "value", ["x" * 10**7, list(range(10**6)), {"a": "y" * 10**6}, 10**4000, [[[[[[[[]]]]]]]] * 99]
)
def test_a_long_value_is_cut(value: object) -> None:
    assert len(short(value)) <= MOST + 1
    assert len(quoted(value)) <= MOST + 1


def test_a_value_that_python_cannot_print_is_described() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(quoted(deep)) < MOST
    assert "bits" in quoted(10**5000)
    while deep:  # freeing it at once would exhaust the stack
        deep = deep.pop()
