"""What the front end receives from an engine: the tokens of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """New tokens of one sample.

    finish: the engine's reason ("stop", "length", "abort"), None while the sample goes on. logprobs: in the engine's
    own form, an entry a token. extra: fields of the choice that only the engine knows.
    """

    index: int
    token_ids: Sequence[int]
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[Any] | None = None
    extra: Mapping[str, Any] | None = None


class Step(NamedTuple):
    """What an engine yields: the pieces of one step, and fields of the answer that only the engine knows.

    cached_tokens: of the prompt, found in the prefix cache; None when the engine does not say.
    """

    pieces: Sequence[Piece]
    cached_tokens: int | None = None
    extra: Mapping[str, Any] | None = None
