"""What every JSON body has to be, whatever its fields: one reading that vLLM's own reading cannot differ from.

Refused are bytes that are no UTF-8, JSON that is no object, a key that is given twice (a proxy may have read the
first), NaN, Infinity and numbers that no 64 bits hold, halves of characters (lone surrogates), and nesting on which
recursive code dies.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal, Said, refuse, shown

MAX_DEPTH = 100
# without one of these in its text, a body has neither an odd number nor half of a character
_SUSPECT = re.compile(r"\d{19}|[eE]\+?\d{3}|NaN|Infinity|\\u[dD]")
_LONG_INTEGER = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INTEGERS = range(-(2**63), 2**64)
_HUGE = 10**400  # in the place of integers that Python would not even read


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Refusal(f"The body: expected each key once, got {shown(key)} twice.", key[:80])
            seen.add(key)
    return found


def _expected(item: Any) -> str | None:
    """What should stand here, where it is a number that no message or tensor holds, or half of a character."""
    if isinstance(item, str):
        return "whole characters, no lone surrogates" if _SURROGATE.search(item) else None
    fits = math.isfinite(item) if isinstance(item, float) else not isinstance(item, int) or item in _INTEGERS
    return None if fits else "a finite number, and integers of at most 64 bits"


def _refuse_odd(value: Any, place: str = "") -> None:
    """A key that is wrong counts for the object that has it."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_odd(key, place)
            _refuse_odd(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_odd(item, f"{place}[{index}]")
    elif expected := _expected(value):
        raise refuse(place[:80] or None, expected, value)


def _refuse_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            below.extend(item.values() if isinstance(item, dict) else item)
        level = [item for item in below if isinstance(item, dict | list)]
        if not level:
            return
    raise _DEPTH


_DEPTH = refuse(None, f"at most {MAX_DEPTH} levels of nesting", Said("more"))


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= 400 else _HUGE


def read(raw: bytes) -> dict[str, Any]:
    """The object that the body holds. Raises Refusal."""
    try:
        text = raw.decode("utf-8")
        # a hook costs time for every number: it is only there where one could be too long
        body = json.loads(text, object_pairs_hook=_once, parse_int=_integer if _LONG_INTEGER.search(text) else None)
    except UnicodeDecodeError as error:
        raise refuse(None, "UTF-8", Said(f"the byte 0x{raw[error.start]:02x} at {error.start}")) from None
    except RecursionError:
        raise _DEPTH from None
    except json.JSONDecodeError as error:
        raise Refusal(f"The body: expected JSON; {error.msg} at character {error.pos}.") from None
    if not isinstance(body, dict):
        raise refuse(None, "a JSON object", body)
    _refuse_depth(body)
    if _SUSPECT.search(text):
        _refuse_odd(body)
    return body
