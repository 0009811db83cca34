"""The one base class of everything that a user's input can cause, and how foreign content stands in a sentence.

The command line prints such an error as one sentence and exits with 2; anything else is a defect of ours and keeps
its traceback. Names and values of a checkpoint or a request are written by others: a control character in one of them
could clear the terminal, and a long one could bury the sentence. So every error escapes what no terminal should get,
and `short` cuts a value to what a reader takes in.
"""

from __future__ import annotations

import reprlib
import unicodedata

MOST = 200  # characters of one foreign value
_MOST_OF_A_TEXT = 20_000  # of a whole error: the end of a log may stand in it
_LAYOUT = "\n\t"
_HARMLESS = {"Zs", "Co", "Cn"}  # not "printable" for Python, and no command to a terminal


def printable(text: str, keep: str = "") -> str:
    """The text with control and format characters, line separators and lone surrogates as escapes; `keep` stays."""
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in keep or unicodedata.category(c) in _HARMLESS
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MOST
        self.maxlist = self.maxtuple = self.maxdict = 12
        self.maxlevel, self.maxlong = 4, 60

    def repr_str(self, text: str, level: int) -> str:
        return repr(text) if len(text) <= self.maxstring else repr(text[: self.maxstring]) + "…"

    def repr_int(self, number: int, level: int) -> str:
        if abs(number) < 10**self.maxlong:
            return repr(number)
        return f"a number of {number.bit_length()} bits"  # its digits may be more than Python prints


def short(value: object, most: int = MOST) -> str:
    """A foreign value as Python writes it, or a text as it stands; at most `most` characters, on one line."""
    text = value[: most + 1] if isinstance(value, str) else _Shortened().repr(value)
    return printable(text if len(text) <= most else text[:most] + "…")


def quoted(value: object) -> str:
    """As `short`, with quotation marks around a text."""
    return short(_Shortened().repr(value))


class InputError(ValueError):
    """Says what was expected, what was got and what to do. Control characters in it become escapes."""

    def __init__(self, sentence: object = "") -> None:
        text = str(sentence)
        if len(text) > _MOST_OF_A_TEXT:
            text = text[:_MOST_OF_A_TEXT] + "…"
        super().__init__(printable(text, keep=_LAYOUT))
