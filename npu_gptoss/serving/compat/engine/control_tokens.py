"""Keeps harmony's control tokens out of the text that a grammar constrains.

xgrammar takes a control token for its letters: within a JSON string `<|end|>` is a text of seven characters. A model
that writes it there ends its message in the middle of the string, and the answer is no JSON. vLLM 0.33 compiles
structures with a vocabulary without control tokens, but not structural tags, which its framing of gpt-oss's turns needs
them for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, repair

if TYPE_CHECKING:
    import torch

BACKEND = "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend"
# Characters that a free text may hold and a literal of a structural tag, such as a function's name, does not.
FREE = ("é", "中")


class Letters:
    """What rows of the bit mask allow of the plain tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._newline = _single(tokenizer, "\n")
        self._free = [number for number in map(functools.partial(_single, tokenizer), FREE) if number is not None]

    def newline(self, row: torch.Tensor) -> bool:
        return self._newline is None or allows(row, self._newline)

    def any(self, row: torch.Tensor) -> bool:
        """Returns whether the row allows any letters, as a free text does and JSON between its strings does not."""
        return bool(self._free) and all(allows(row, number) for number in self._free)


class ControlTokens:
    """The special tokens of one tokenizer, without its end of text, which grammars place themselves."""

    def __init__(self, tokenizer: Any, words: int) -> None:
        """`words`: int32 in a row of the bit mask."""
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special and number < 32 * words}
        self._allowed = mask_without(special - {tokenizer.eos_token_id}, words)
        self._letters = Letters(tokenizer)

    def clear(self, row: torch.Tensor) -> None:
        """Forbids the control tokens in one row of the bit mask, in place, if that leaves a token."""
        rest = row & self._allowed
        if rest.any():
            row.copy_(rest)

    def in_a_string(self, row: torch.Tensor) -> bool:
        """Returns whether the row allows any letters but no newline, as JSON's strings do and no literal of a tag."""
        return self._letters.any(row) and not self._letters.newline(row)


def mask_without(numbers: Iterable[int], words: int) -> torch.Tensor:
    """Makes a row of the bit mask, [words] int32, that allows every other token."""
    import torch

    allowed = torch.full((words,), -1, dtype=torch.int32)
    for number in numbers:
        allowed[number // 32] &= ~_bit(number)
    return allowed


def _bit(number: int) -> int:
    """Returns the token's bit in its int32."""
    bit = 1 << number % 32
    return bit - (1 << 32) if bit == 1 << 31 else bit


def allows(row: torch.Tensor, number: int) -> bool:
    """Returns whether a row of the bit mask, int32, allows the token."""
    return bool(int(row[number // 32]) & _bit(number))


def _single(tokenizer: Any, text: str) -> int | None:
    numbers = tokenizer.encode(text, add_special_tokens=False)
    return numbers[0] if len(numbers) == 1 else None


@repair(
    "control-tokens",
    f"{BACKEND}.compile_grammar",
    releases="0.11 0.23 0.33",
    upstream="mlc-ai/xgrammar issue 832",
    until="vLLM filters the control tokens of structural tags too",
)
def install(module: ModuleType) -> None:
    """xgrammar takes a control token for its letters: `<|end|>` within a JSON string ends the message there."""
    filtered = hasattr(module.XgrammarBackend, "_filter_special_tokens")  # 0.33, whose lark may name control tokens

    @around(module.XgrammarBackend, "compile_grammar")
    def compile_grammar(original: Original, self: Any, request_type: Any, *arguments: Any, **keywords: Any) -> Any:
        grammar = original(self, request_type, *arguments, **keywords)
        fill, literal = grammar.fill_bitmask, filtered or request_type.name == "STRUCTURAL_TAG"

        def fill_bitmask(bitmask: torch.Tensor, index: int) -> None:
            fill(bitmask, index)
            row = bitmask[index]
            tokens = control_tokens(self.tokenizer, len(row))
            if not literal or tokens.in_a_string(row):
                tokens.clear(row)

        grammar.fill_bitmask = fill_bitmask
        return grammar


@functools.lru_cache(maxsize=1)
def control_tokens(tokenizer: Any, words: int) -> ControlTokens:
    """Returns those of the engine's tokenizer; `words` as there."""
    return ControlTokens(tokenizer, words)
