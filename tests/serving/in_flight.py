"""Requests that are in flight when a server ends, and the processes that must not outlive it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

KINDS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}),
    "completion": ("/v1/completions", {"prompt": "Hello", "ignore_eos": True}),
}
LONG = 7000  # tokens; a minute at least


@dataclass
class Answer:
    """`status` 0: the connection broke off. `text` is the whole body."""

    kind: str
    streamed: bool
    status: int = -1
    text: str = ""

    def error(self) -> dict[str, Any]:
        """The error of the body, or for a stream its last event that is an error; {} without any."""
        if not self.streamed or self.status != 200:
            return json.loads(self.text).get("error") or {}
        events = [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]
        return next((event["error"] for event in reversed(events) if event.get("error")), {})


class InFlight:
    """Long requests of each kind, streamed and whole, sent at once; `wait` gives their answers."""

    def __init__(self, url: str, model: str) -> None:
        self.answers = [Answer(kind, streamed) for kind in KINDS for streamed in (False, True)]
        self._threads = [threading.Thread(target=_ask, args=(url, model, a), daemon=True) for a in self.answers]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> list[Answer]:
        for thread in self._threads:
            thread.join(seconds)
        return self.answers


def _ask(url: str, model: str, answer: Answer) -> None:
    path, fields = KINDS[answer.kind]
    body = {"model": model, "max_tokens": LONG, "stream": answer.streamed, **fields}
    try:
        reply = requests.post(url + path, json=body, timeout=120)
        answer.text, answer.status = reply.content.decode(), reply.status_code
    except requests.RequestException as error:
        answer.text, answer.status = repr(error), 0


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    """Of a process, without itself."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def engines_of(pid: int) -> list[int]:
    """The processes of a server's engine cores."""
    return [child for child in descendants(pid) if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()]
