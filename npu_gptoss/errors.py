"""Errors that a user's input causes: `InputError`, the base class, and `Refusal`, the parts of its sentence.

The command line prints such an error as one sentence and exits with 2; any other exception is our defect and keeps its
traceback. Names and values in a checkpoint or a request are foreign: a control character could clear the terminal, a
long value could bury the sentence. So every error escapes control characters, and `short` cuts values.

Tests compare `field` (an option, a variable, a field, an argument) and never the English.
"""

from __future__ import annotations

import copy
import re
import reprlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

MOST = 200  # characters of one foreign value
_MOST_OF_A_TEXT = 20_000  # of a whole error, which may contain the end of a log
_HARMLESS = {"Zs", "Co", "Cn"}  # not "printable" for Python, but harmless on a terminal


def printable(text: str, keep: str = "") -> str:
    """Escapes control and format characters, line separators and lone surrogates; `keep` stays."""
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
        return f"a number of {number.bit_length()} bits"  # Python may refuse to print its digits


def short(value: object, most: int = MOST) -> str:
    """A foreign value as Python writes it, or a plain text; at most `most` characters, on one line."""
    text = value[: most + 1] if isinstance(value, str) else _Shortened().repr(value)
    return printable(text if len(text) <= most else text[:most] + "…")


def quoted(value: object) -> str:
    """Like `short`, with quotation marks around a text."""
    return short(_Shortened().repr(value))


_VARIABLE = re.compile(r"[A-Z0-9]+(_[A-Z0-9]+)+")


@dataclass(frozen=True)
class Refusal:
    """A setting that cannot be served. `str` gives the sentence, without a full stop.

    option: as the user writes it: `--dtype`, `NPU_GPTOSS_EXPERT_WEIGHTS`, `rope_scaling.factor`, `vllm-ascend`.
    got: the value as the user writes it; None for an option without a value.
    why: a clause with the reason. remedy: a command to the user, in lower case, other than to leave the option out.
    """

    option: str
    got: object
    why: str
    remedy: str = "leave it out"
    joint: str = ""  # between option and value; by default "=" for a variable, else a blank

    @property
    def asked(self) -> str:
        """The setting as the user writes it: `--dtype float16`, `VLLM_ASCEND_ENABLE_FLASHCOMM=1`."""
        joint = self.joint or ("=" if _VARIABLE.fullmatch(self.option) else " ")
        return short(self.option) if self.got is None else f"{short(self.option)}{joint}{short(str(self.got))}"

    @property
    def finding(self) -> str:
        """The sentence without its remedy."""
        return f"{self.asked}: {self.why}"

    @property
    def advice(self) -> str:
        """The remedy as a full sentence."""
        return f"{self.remedy[:1].upper()}{self.remedy[1:]}."

    def __str__(self) -> str:
        return f"{self.finding}; {self.remedy}"


def asked_for(checks: Iterable[tuple[bool, Refusal]]) -> list[Refusal]:
    """The refusals whose checks hold. checks: pairs of condition and refusal."""
    return [refusal for wrong, refusal in checks if wrong]


class InputError(ValueError):
    """States the expected value, the actual value and the remedy. Control characters in it become escapes.

    said: a sentence, or the Refusal that makes it. field: the wrong option, variable, field or argument.
    refusals: all refusals in the sentence, if it consists of them.
    """

    layout = ""  # control characters that stay: a class with a list keeps "\n", which a file's name may hold too

    def __init__(self, said: object = "", *, field: str | None = None, refusals: tuple[Refusal, ...] = ()) -> None:
        if isinstance(said, Refusal):
            refusals = (said,)
        text = f"{said}." if isinstance(said, Refusal) else str(said)
        if len(text) > _MOST_OF_A_TEXT:
            text = text[:_MOST_OF_A_TEXT] + "…"
        super().__init__(printable(text, keep=self.layout))
        self.refusals = refusals
        self.field = field or (refusals[0].option if refusals else None)

    def at(self, place: object) -> InputError:
        """The same error with a place in front, such as a file or "prompt 3"."""
        moved = copy.copy(self)
        moved.args = (printable(f"{place}: {self}", keep=self.layout),)
        return moved
