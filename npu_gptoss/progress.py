"""Progress bars on standard error, shown only if that is a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def bar(total: int, what: str, unit: str, *, shown: bool = True) -> tqdm:
    """A context manager with `update()`; the bar disappears at its end. unit: of one step, in the singular."""
    hidden = None if shown else True  # None: tqdm asks whether standard error is a terminal
    return tqdm(total=total, desc=what, unit=f" {unit}s", disable=hidden, leave=False, dynamic_ncols=True)


def counted(items: Iterable[Item], total: int, what: str, unit: str, *, shown: bool = True) -> Iterator[Item]:
    """Yields the items and shows a bar. Keeps no item alive while the next is made: a tensor may be a gigabyte."""
    source = iter(items)
    with bar(total, what, unit, shown=shown) as shows:
        while True:
            try:
                yield next(source)
            except StopIteration:
                return
            shows.update()


def say(line: str) -> None:
    """Prints to standard output, above the visible bars."""
    with tqdm.external_write_mode():
        print(line, flush=True)
