"""The engine's interface to the front end: the tokens of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """New tokens of one sample.

    finish: the engine's reason ("stop", "length", "abort"), None while the sample goes on. logprobs: in the engine's
    form, an entry a token. extra: choice fields that come from the engine.
    """

    index: int
    token_ids: Sequence[int]
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[Any] | None = None
    extra: Mapping[str, Any] | None = None


class Step(NamedTuple):
    """A step of the engine: its pieces, and answer fields that come from the engine.

    cached_tokens: prompt tokens found in the prefix cache; None if the engine does not report them.
    """

    pieces: Sequence[Piece]
    cached_tokens: int | None = None
    extra: Mapping[str, Any] | None = None
