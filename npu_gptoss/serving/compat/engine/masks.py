"""Masks of a constrained text: no control token of harmony within it, no endless white space between JSON's tokens.

xgrammar takes a control token for its letters: within a JSON string `<|end|>` is a text of seven characters. A model
that writes it there ends its message in the middle of the string, and the answer is no JSON. vLLM 0.33 compiles
structures with a vocabulary without control tokens, but not structural tags, which its framing of gpt-oss's turns needs
them for. It takes the letters for the control token, too: `}`, `<`, `|`, `end`, `|`, `>` ended an answer in JSON.

JSON allows any amount of white space between its tokens and xgrammar does too, so a model that has lost its way writes
line ends until max_tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.admission.left_out import LARK
from npu_gptoss.serving.compat.patch import Original, around, repair
from npu_gptoss.serving.compat.targets import ALL

if TYPE_CHECKING:
    import torch

COMPILES = "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar"
# Characters that a free text may hold and a literal of a structural tag, such as a function's name, does not.
FREE = ("é", "中")
MOST = 8  # tokens of white space in a row; a line end with its indentation is one or two
_CONTROL = re.compile(r"<\|\w+\|>")  # by its letters
JSON = ("JSON", "JSON_OBJECT", "STRUCTURAL_TAG")
BYTES = set("ĠĊĉč")  # space, line feed, tab and carriage return, as a byte-level vocabulary writes them


class Tokens:
    """The control tokens and the white space of one tokenizer, and what they look like in a row of the bit mask.

    The end of text is no control token here: grammars place it themselves.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        """size: of the model's vocabulary. Takes a quarter of a second: it reads 200 000 tokens."""
        words = -(-size // 32)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        texts = tokenizer.get_vocab().items()
        spelled = {number for text, number in texts if text.endswith("<") or "<|" in text} - special
        self.spaces = frozenset(number for text, number in texts if text and BYTES.issuperset(text))
        self._text = mask_without(special - {tokenizer.eos_token_id}, words)
        self._not_spelled = mask_without(spelled, words)
        self._no_space = mask_without(self.spaces, words)
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", *FREE))
        self._newline, *free = (numbers[0] if len(numbers) == 1 else None for numbers in encoded)
        self._free = [number for number in free if number is not None]

    def forbid_control(self, row: torch.Tensor, *, literals: bool, spelled: bool = True) -> None:
        """Forbids the control tokens in one row of the bit mask, in place, if that leaves a token.

        literals: the grammar has literals with control tokens. They stay, and strings lose theirs: a row of a string
        allows any letters but no newline. Without `spelled`, ordinary tokens do not begin their letters outside of
        texts.
        """
        if not literals or (self._is_free(row) and not self._allows_newline(row)):
            _restrict(row, self._text)
        if not (spelled or self._is_free(row)):
            _restrict(row, self._not_spelled)

    def forbid_space(self, row: torch.Tensor) -> None:
        """Forbids white space in one row of the bit mask, in place, where it only parts the tokens of JSON."""
        if self._allows_newline(row) and not self._is_free(row):
            _restrict(row, self._no_space)

    def _allows_newline(self, row: torch.Tensor) -> bool:
        return self._newline is None or allows(row, self._newline)

    def _is_free(self, row: torch.Tensor) -> bool:
        """Returns whether the row allows any letters, as a free text does and JSON between its strings does not."""
        return bool(self._free) and all(allows(row, number) for number in self._free)


@functools.lru_cache(maxsize=1)
def tokens_of(tokenizer: Any, size: int) -> Tokens:
    """Returns those of the engine's tokenizer. `grammars.new_backend` makes them, before the first request."""
    return Tokens(tokenizer, size)


def mask_without(numbers: Iterable[int], words: int) -> torch.Tensor:
    """Makes a row of the bit mask, [words] int32, that allows every other token."""
    import torch

    allowed = torch.full((words,), -1, dtype=torch.int32)
    for number in numbers:
        if number < 32 * words:
            allowed[number // 32] &= ~_bit(number)
    return allowed


def _restrict(row: torch.Tensor, mask: torch.Tensor) -> None:
    rest = row & mask
    if rest.any():
        row.copy_(rest)


def _bit(number: int) -> int:
    """Returns the token's bit in its int32."""
    bit = 1 << number % 32
    return bit - (1 << 32) if bit == 1 << 31 else bit


def allows(row: torch.Tensor, number: int) -> bool:
    """Returns whether a row of the bit mask, int32, allows the token."""
    return bool(int(row[number // 32]) & _bit(number))


class Masked:
    """A grammar of xgrammar whose masks allow less. It is no cycle, which would keep its matcher in memory until
    Python looks for cycles."""

    def __init__(self, grammar: Any, tokens: Tokens) -> None:
        self.grammar, self.tokens = grammar, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grammar, name)


class WithoutControl(Masked):
    """A mask without control characters; how: the arguments of `Tokens.forbid_control`."""

    def __init__(self, grammar: Any, tokens: Tokens, **how: bool) -> None:
        super().__init__(grammar, tokens)
        self.how = how

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self.grammar.fill_bitmask(bitmask, index)
        self.tokens.forbid_control(bitmask[index], **self.how)


class BoundedSpace(Masked):
    """A mask that allows at most MOST tokens of white space in a row."""

    def __init__(self, grammar: Any, tokens: Tokens) -> None:
        super().__init__(grammar, tokens)
        self.written: list[int] = []

    def accept_tokens(self, request_id: str, new: list[int]) -> bool:
        accepted = self.grammar.accept_tokens(request_id, new)
        if accepted:
            self.written += new
        return accepted

    def rollback(self, count: int) -> None:
        self.grammar.rollback(count)
        del self.written[len(self.written) - count :]

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        self.grammar.fill_bitmask(bitmask, index)
        last = self.written[-MOST:]
        if len(last) == MOST and self.tokens.spaces.issuperset(last):
            self.tokens.forbid_space(bitmask[index])


@repair(
    "control-tokens",
    COMPILES,
    releases=ALL,
    upstream="mlc-ai/xgrammar issue 832",
    until="vLLM filters the control tokens of structural tags too",
)
def install_control(module: ModuleType) -> None:
    """xgrammar takes a control token for its letters: `<|end|>` within a JSON string ends the message there."""
    module.StructuredOutputGrammar.register(Masked)
    filtered = hasattr(module.XgrammarBackend, "_filter_special_tokens")  # 0.33, whose lark may name control tokens

    @around(module.XgrammarBackend, "compile_grammar")
    def compile_grammar(
        original: Original, self: Any, request_type: Any, grammar_spec: str, *more: Any, **named: Any
    ) -> Any:
        grammar = original(self, request_type, grammar_spec, *more, **named)
        tags = request_type.name == "STRUCTURAL_TAG"
        spelled = not tags or "<" in _CONTROL.sub("", grammar_spec)
        tokens = tokens_of(self.tokenizer, self.vocab_size)
        return WithoutControl(grammar, tokens, literals=filtered or tags, spelled=spelled)


@repair(
    "white-space",
    COMPILES,
    "vllm.v1.structured_output.backend_guidance:GuidanceBackend.compile_grammar",
    releases=ALL,
    until="vLLM bounds the white space of JSON",
)
def install_space(module: ModuleType) -> None:
    """A constrained answer may be white space until max_tokens."""
    from vllm.v1.structured_output import backend_guidance

    module.StructuredOutputGrammar.register(Masked)

    def compile_grammar(
        original: Original, self: Any, request_type: Any, grammar_spec: str, *more: Any, **named: Any
    ) -> Any:
        grammar = original(self, request_type, grammar_spec, *more, **named)
        if request_type.name not in JSON and not grammar_spec.startswith(LARK):
            return grammar
        return BoundedSpace(grammar, tokens_of(self.tokenizer, self.vocab_size))

    for owner in (module.XgrammarBackend, backend_guidance.GuidanceBackend):
        around(owner, "compile_grammar")(compile_grammar)
