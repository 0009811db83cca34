"""Text to token ids and back, with the checkpoint's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from npu_gptoss.errors import InputError


class TextCodec:
    """tokenizer.json of a model directory, read at first use. A model without one still takes and gives token ids."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    @property
    def available(self) -> bool:
        return self._path.is_file()

    def encode(self, text: str) -> list[int]:
        """No token is added; the names of special tokens in the text (`<|start|>`) become those tokens."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair, "\\ud800"
            raise InputError(f"the text is not valid Unicode: {error}") from None
        return self._load().encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        return self._load().decode(list(token_ids), skip_special_tokens=True)

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self.available:
                raise InputError(
                    f"{self._path} is missing, so text cannot be turned into tokens: get it from the original "
                    "checkpoint, or give token ids"
                )
            try:
                self._tokenizer = Tokenizer.from_file(str(self._path))
            except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
                raise InputError(f"{self._path} cannot be read as a tokenizer: {error}") from error
        return self._tokenizer
