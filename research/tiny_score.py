"""Labelled chats, and a judge of replies to them.

Each example has exactly one right reply, which greedy decoding of a trained model gives token for token. The judge
looks for the answer in a reply, so another wording counts too. `tiny_data.py` makes the examples.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from research.tiny_text import Reply, Style, parse_reply, render_prompt, render_reply


@dataclass(frozen=True)
class Example:
    """One labelled chat: the request (`messages`, `tools`, `reasoning_effort`), its one right `reply`, its label."""

    task: str
    messages: tuple[dict[str, Any], ...]
    reply: Reply
    answer: str  # of the final channel: a number, a letter, a text; of a call its arguments as JSON
    tools: tuple[dict[str, Any], ...] = ()
    reasoning_effort: str = "medium"
    kind: str = ""  # a finer name within the task, for reports

    def prompt(self, style: Style | None = None) -> str:
        return render_prompt(self.messages, self.tools, self.reasoning_effort, style)

    def completion(self) -> str:
        return render_reply(self.reply)

    def is_right(self, generated: str) -> bool:
        """Judges a generated harmony text (everything after `<|start|>assistant`)."""
        reply = parse_reply(generated)
        return self.is_right_reply(reply.content, reply.call_name, reply.call_arguments)

    def is_right_reply(
        self, content: str | None, call_name: str | None = None, call_arguments: str | None = None
    ) -> bool:
        """Judges a server's parsed reply: its content, and its function call if it has one."""
        if self.task == "call":
            try:
                return call_name == self.reply.call_name and json.loads(call_arguments or "") == json.loads(self.answer)
            except ValueError:
                return False
        content = (content or "").strip()
        if self.task == "choice":
            found = re.findall(r"ANSWER: ([A-D])\b", content)
            return bool(found) and found[-1] == self.answer
        if self.answer.isdigit():
            numbers = re.findall(r"\d+", content)
            return bool(numbers) and numbers[-1 if self.task == "sum" else 0] == self.answer
        return content == self.answer


@dataclass(frozen=True)
class Score:
    """Right answers by task; `overall` is the mean of the tasks."""

    right: dict[str, int]
    total: dict[str, int]

    def accuracy(self, task: str) -> float:
        return self.right.get(task, 0) / self.total[task]

    @property
    def overall(self) -> float:
        return sum(self.accuracy(task) for task in self.total) / len(self.total)

    def __str__(self) -> str:
        tasks = " ".join(f"{task} {100 * self.accuracy(task):.1f}" for task in self.total)
        return f"{100 * self.overall:.1f} % ({tasks})"


def tally(examples: Sequence[Example], right: Iterable[bool]) -> Score:
    """Counts one truth value for each example into a Score."""
    pairs = list(zip(examples, right, strict=True))
    count, total = Counter(each.task for each, ok in pairs if ok), Counter(each.task for each, _ in pairs)
    return Score(dict(count), dict(total))
