"""Bars for what takes long: on standard error where that is a terminal, silent where it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def bar(total: int, what: str, unit: str, *, shown: bool = True) -> tqdm:
    """A context manager with `update()`; it leaves nothing behind. unit: of one step, in the singular."""
    hidden = None if shown else True  # None: tqdm asks whether standard error is a terminal
    return tqdm(total=total, desc=what, unit=f" {unit}s", disable=hidden, leave=False, dynamic_ncols=True)


def counted(items: Iterable[Item], total: int, what: str, unit: str, *, shown: bool = True) -> Iterator[Item]:
    """The items, with a bar. Keeps none alive while the next one is made: a tensor of them may be a gigabyte."""
    source = iter(items)
    with bar(total, what, unit, shown=shown) as shows:
        while True:
            try:
                yield next(source)
            except StopIteration:
                return
            shows.update()


def say(line: str) -> None:
    """Prints to standard output, above the bars that are shown."""
    with tqdm.external_write_mode():
        print(line, flush=True)
