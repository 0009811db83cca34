"""Ends runs of white space between the tokens of a constrained JSON text.

JSON allows any amount there and xgrammar does too, so a model that has lost its way writes line ends until max_tokens.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.engine.control_tokens import BACKEND, Letters, mask_without
from npu_gptoss.serving.compat.patch import Original, around, repair

if TYPE_CHECKING:
    import torch

MOST = 8  # tokens in a row; a line end with its indentation is one or two
JSON = ("JSON", "JSON_OBJECT", "STRUCTURAL_TAG")
BYTES = set("ĠĊĉč")  # space, line feed, tab and carriage return, as a byte-level vocabulary writes them


class WhiteSpace:
    """The tokens of one tokenizer that are white space and nothing else."""

    def __init__(self, tokenizer: Any, words: int) -> None:
        """`words`: int32 in a row of the bit mask."""
        found = (number for text, number in tokenizer.get_vocab().items() if text and BYTES.issuperset(text))
        self.numbers = frozenset(number for number in found if number < 32 * words)
        self._others, self._letters = mask_without(self.numbers, words), Letters(tokenizer)

    def clear(self, row: torch.Tensor) -> None:
        """Forbids white space in one row of the bit mask, in place, where it only parts the tokens of JSON."""
        rest = row & self._others
        if self._letters.newline(row) and not self._letters.any(row) and rest.any():
            row.copy_(rest)


@functools.lru_cache(maxsize=1)
def white_space(tokenizer: Any, words: int) -> WhiteSpace:
    """Returns that of the engine's tokenizer; `words` as there."""
    return WhiteSpace(tokenizer, words)


@repair(
    "white-space",
    f"{BACKEND}.compile_grammar",
    releases="0.11 0.23 0.33",
    upstream="none",
    until="vLLM bounds the white space of JSON",
)
def install(module: ModuleType) -> None:
    """A constrained answer may be white space until max_tokens."""

    @around(module.XgrammarBackend, "compile_grammar")
    def compile_grammar(original: Original, self: Any, request_type: Any, *arguments: Any, **keywords: Any) -> Any:
        grammar = original(self, request_type, *arguments, **keywords)
        if request_type.name not in JSON:
            return grammar
        accept, rollback, fill, tokens = grammar.accept_tokens, grammar.rollback, grammar.fill_bitmask, []

        def accept_tokens(request_id: str, new: list[int]) -> bool:
            accepted = accept(request_id, new)
            tokens.extend(new)
            return accepted

        def roll_back(count: int) -> None:
            rollback(count)
            del tokens[len(tokens) - count :]

        def fill_bitmask(bitmask: torch.Tensor, index: int) -> None:
            fill(bitmask, index)
            space, last = white_space(self.tokenizer, len(bitmask[index])), tokens[-MOST:]
            if len(last) == MOST and space.numbers.issuperset(last):
                space.clear(bitmask[index])

        grammar.accept_tokens, grammar.rollback, grammar.fill_bitmask = accept_tokens, roll_back, fill_bitmask
        return grammar
