"""Engines in processes of their own, which start together and then take turns: a start is the host's, a turn the GPU's.

A child is told JSON lines and answers with JSON lines. What else it prints goes into its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any

LOG_TAIL = 2000  # characters


class Child:
    """One process. `name` is for what is printed of it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | environment,
            )
        self._reader = ThreadPoolExecutor(1)

    def tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `hear` says what became of it
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def hear(self, seconds: float) -> Any:
        """Its next answer. Raises RuntimeError with the end of its log where there is none in time."""
        assert self._process.stdout is not None
        try:
            line = self._reader.submit(self._process.stdout.readline).result(seconds)
        except TimeoutError:
            line = ""
            self._process.kill()
        if not line:
            raise RuntimeError(f"{self.name}: no answer. Its log ends:\n{self.log.read_text()[-LOG_TAIL:]}")
        return json.loads(line)

    def ask(self, what: Any, seconds: float) -> Any:
        self.tell(what)
        return self.hear(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.shutdown()


def inside() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """In a child: how it hears, and how it answers. From then on its standard output goes to its log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lambda: json.loads(sys.stdin.readline()), lambda what: print(json.dumps(what), file=answers, flush=True)
