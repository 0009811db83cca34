"""Text to token ids and back, with the checkpoint's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from npu_gptoss.errors import InputError
from npu_gptoss.files import is_there
from npu_gptoss.tokenizer import FILE_NAME, check_vocabulary, load_tokenizer, panics_told


class TextCodec:
    """tokenizer.json of a model directory, read at first use. A model without one still takes and gives token ids."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._tokenizer: Tokenizer | None = None

    @property
    def available(self) -> bool:
        return is_there(self._path, InputError)

    def expect(self) -> None:
        """Raises InputError where there is no file."""
        if not self.available:
            raise InputError(
                f"{self._path} is missing, so text cannot be turned into tokens: get it from the original "
                "checkpoint, or give token ids",
                field=self._path.name,
            )

    def check(self, vocab_size: int) -> None:
        """Reads the file, where there is one. Raises InputError for one that cannot be used with this model."""
        if self.available:
            check_vocabulary(self._path, self._load(), vocab_size)

    def encode(self, text: str) -> list[int]:
        """No token is added; the names of special tokens in the text (`<|start|>`) become those tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair, "\\ud800"
            raise InputError(f"the text is not valid Unicode: {error}", field="text") from None
        tokenizer = self._load()
        with panics_told(f"{self._path} cannot turn this text into tokens"):
            return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        tokenizer = self._load()
        with panics_told(f"{self._path} cannot turn these tokens into text"):
            return tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            self.expect()
            self._tokenizer = load_tokenizer(self._path)
        return self._tokenizer
