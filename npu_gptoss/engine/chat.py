"""Chats of the offline engine, read and written by the server's own front end (`frontend/chat.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from npu_gptoss.engine.request import Request
from npu_gptoss.errors import InputError
from npu_gptoss.frontend import chat
from npu_gptoss.frontend.engine import Piece
from npu_gptoss.frontend.request import Defaults
from npu_gptoss.frontend.turn import Event
from npu_gptoss.harmony.encoding import load_encoder
from npu_gptoss.harmony.library import load_encoding

# fields of a chat that a line of a prompts file may have; the engine's options say how it is sampled
FIELDS = frozenset(chat.READ - {"messages", "stream_options", "echo", "include_reasoning"})


class Chats:
    """Harmony for a model directory."""

    def __init__(self, model_dir: Path) -> None:
        self.library = load_encoding(model_dir)
        self.encoder = load_encoder(Path(model_dir))
        self.stop_token_ids = tuple(self.library.stop_tokens_for_assistant_actions())

    def read(self, fields: Mapping[str, Any], date: str | None = None, effort: str | None = None) -> chat.Request:
        """A chat from OpenAI's fields. Raises ConversationError, which names the field.

        date: YYYY-MM-DD, default today. effort: where the fields name none.
        """
        request = chat.read(fields, Defaults(effort=effort, date=date))
        if request.asked.structure:
            raise InputError(
                f"{request.asked.structure.param}: the offline engine holds an answer to no structure; leave it out, "
                "or ask a server.",
                field=request.asked.structure.param,
            )
        return request

    def prompt(self, request: chat.Request) -> list[int]:
        """Token ids up to where the model begins to write."""
        return request.asked.prompt(self.encoder)

    def reading(self, request: chat.Request) -> Reading:
        return Reading(request, chat.Choice(request, request.asked.turn(self.encoder)))


class Reading:
    """The answer to one chat while the engine generates it."""

    def __init__(self, request: chat.Request, choice: chat.Choice) -> None:
        self.request, self.choice = request, choice
        self._read = 0

    def update(self, request: Request, cancel: Callable[[Request], None]) -> list[Event]:
        """Read the engine's new tokens. A stop string ends the request in the engine, too."""
        sample = self.choice.sample
        if sample.finish is not None:
            return []
        new = request.token_ids[request.prompt_length + self._read :]
        self._read += len(new)
        events = sample.read(Piece(0, new, request.finish_reason))
        if sample.turn.stopped is not None and request.finish_reason is None:
            cancel(request)
        return events

    @property
    def message(self) -> dict[str, Any]:
        """The message as chat completions write it."""
        return self.choice.message()
