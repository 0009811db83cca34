"""The blocks of an answer in Anthropic's form: a stream sends each change, a whole answer the final state.

Consecutive parts of a turn of the same kind make one block, so that a client that reads only the first text block has
all of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npu_gptoss.frontend.message_blocks import INVALID_JSON
from npu_gptoss.frontend.sample import new_id
from npu_gptoss.frontend.turn import Event
from npu_gptoss.harmony.parser import Kind

Json = dict[str, Any]

SIGNATURE = "bnB1X2dwdG9zcw=="  # of thinking; clients expect one and send it back; it is not read
# kind of a part -> type of its block, type of a change, and the field of the text in a change
_TYPES = {
    Kind.ANSWER: ("text", "text_delta", "text"),
    Kind.REASONING: ("thinking", "thinking_delta", "thinking"),
    Kind.CALL: ("tool_use", "input_json_delta", "partial_json"),
}


@dataclass
class _Block:
    """A block of an answer. part: the number of the turn's last part in it."""

    index: int
    kind: Kind
    part: int
    name: str = ""
    id: str = ""
    text: str = ""

    def shown(self) -> Json:
        """Returns the block for a whole answer."""
        if self.kind is Kind.CALL:
            return {"type": "tool_use", "id": self.id, "name": self.name, "input": _input(self.text)}
        kind, _, name = _TYPES[self.kind]
        signature = {"signature": SIGNATURE} if self.kind is Kind.REASONING else {}
        return {"type": kind, name: self.text} | signature

    def start(self) -> str:
        kind, _, name = _TYPES[self.kind]
        block: Json = {"type": kind}
        block |= {"id": self.id, "name": self.name, "input": {}} if self.kind is Kind.CALL else {name: ""}
        block |= {"signature": ""} if self.kind is Kind.REASONING else {}
        return line_of("content_block_start", index=self.index, content_block=block)

    def delta(self, text: str) -> str:
        """Formats the event without json.dumps of the whole, because every token needs one."""
        _, kind, name = _TYPES[self.kind]
        return (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {self.index}, "delta": '
            f'{{"type": "{kind}", "{name}": {json.dumps(text, ensure_ascii=False)}}}}}\n\n'
        )

    def stop(self) -> str:
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        first = line_of("content_block_delta", index=self.index, delta=signed) if self.kind is Kind.REASONING else ""
        return first + line_of("content_block_stop", index=self.index)


def line_of(kind: str, **fields: Any) -> str:
    """Returns the lines of one event of a stream."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def _input(text: str) -> Json:
    """Returns a call's input from the model's arguments, which may be cut off or no JSON: see INVALID_JSON."""
    try:
        value = json.loads(text or "{}", strict=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # Infinity and lone surrogates are no JSON
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


class Blocks:
    """The blocks of an answer so far; `read` adds events of its turn."""

    def __init__(self) -> None:
        self.all: list[_Block] = []
        self._open: _Block | None = None

    def read(self, events: Sequence[Event]) -> list[str]:
        """Returns the lines that a stream sends for these events."""
        lines: list[str] = []
        for event in events:
            part, kind = event.part, event.part.kind
            if kind is not Kind.CALL and event.what != "more":
                continue
            block, text = self._open, event.text
            if block is None or block.kind is not kind or event.what == "begun":
                lines += self.close()
                block = self._open = self._begun(kind, part.number, part.name)
                lines.append(block.start())
            if block.part != part.number:
                text, block.part = f"\n{text}", part.number
            if text:
                block.text += text
                lines.append(block.delta(text))
            if event.what == "ended":
                lines += self.close()
        return lines

    def close(self) -> list[str]:
        """Ends the open block."""
        block, self._open = self._open, None
        return [] if block is None else [block.stop()]

    def end(self) -> list[str]:
        """Ends the answer. An empty answer gets an empty text: clients read the first block."""
        lines = self.close()
        if not self.all:
            self._open = self._begun(Kind.ANSWER, 0, None)
            lines = [self._open.start(), *self.close()]
        return lines

    def _begun(self, kind: Kind, part: int, name: str | None) -> _Block:
        block = _Block(len(self.all), kind, part, name or "", new_id("toolu") if kind is Kind.CALL else "")
        self.all.append(block)
        return block
