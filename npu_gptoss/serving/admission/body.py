"""Reads a JSON body so strictly that vLLM's own parser cannot read it differently.

Refuses invalid UTF-8, JSON that is no object, duplicate keys (a proxy may have used the first), NaN, Infinity, numbers
of more than 64 bits, lone surrogates, and nesting that overflows recursive code.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal, Said, refuse, shown

MAX_DEPTH = 100
# a body whose text matches none of these has neither an odd number nor a lone surrogate
_SUSPECT = re.compile(r"\d{19}|[eE]\+?\d{3}|NaN|Infinity|\\u[dD]")
_LONG_INTEGER = re.compile(r"\d{19}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INTEGERS = range(-(2**63), 2**64)
_HUGE = 10**400  # replaces integers that Python would refuse to parse


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
    """Describes the valid value if the item is a number out of range or a text with a lone surrogate; else None."""
    if isinstance(item, str):
        return "whole characters, no lone surrogates" if _SURROGATE.search(item) else None
    fits = math.isfinite(item) if isinstance(item, float) else not isinstance(item, int) or item in _INTEGERS
    return None if fits else "a finite number, and integers of at most 64 bits"


def _refuse_odd(value: Any, place: str = "") -> None:
    """Raises Refusal for the first bad value; a bad key is reported at its object."""
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
    raise _too_deep()


def _too_deep() -> Refusal:
    """Makes a new one each time: an exception keeps the frames of all its raises, with their bodies."""
    return refuse(None, f"at most {MAX_DEPTH} levels of nesting", Said("more"))


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= 400 else _HUGE


def read(raw: bytes) -> dict[str, Any]:
    """Returns the object in the body. Raises Refusal."""
    try:
        text = raw.decode("utf-8")
        # a hook costs time for every number, so it is set only if a number may be too long
        body = json.loads(text, object_pairs_hook=_once, parse_int=_integer if _LONG_INTEGER.search(text) else None)
    except UnicodeDecodeError as error:
        raise refuse(None, "UTF-8", Said(f"the byte 0x{raw[error.start]:02x} at {error.start}")) from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise Refusal(f"The body: expected JSON; {error.msg} at character {error.pos}.") from None
    if not isinstance(body, dict):
        raise refuse(None, "a JSON object", body)
    _refuse_depth(body)
    if _SUSPECT.search(text):
        _refuse_odd(body)
    return body
