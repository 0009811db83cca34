"""Bars for what takes long, on standard error where that is a terminal, and lines that do not run into them."""

from __future__ import annotations

from tqdm import tqdm


def bar(total: float, what: str, unit: str, **options: object) -> tqdm:
    """A bar that says nothing where standard error is no terminal, and leaves nothing behind."""
    return tqdm(total=total, desc=what, unit=unit, disable=None, leave=False, dynamic_ncols=True, **options)


def say(line: str) -> None:
    """Prints a line to standard output, above the bars that are shown."""
    with tqdm.external_write_mode():
        print(line, flush=True)
