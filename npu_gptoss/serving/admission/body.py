"""What every JSON body has to be, whatever its fields: one reading that vLLM's own reading cannot differ from.

Refused are bytes that are no UTF-8, JSON that is no object, a key that is given twice (a proxy may have read the
first), NaN, Infinity and numbers that no 64 bits hold, halves of characters (lone surrogates), and nesting on which
recursive code dies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal, Said, refuse, shown

MAX_DEPTH = 100
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


def _odd(item: Any) -> bool:
    """Whether this is a number that the engine's messages or tensors could not hold."""
    return not math.isfinite(item) if isinstance(item, float) else isinstance(item, int) and item not in _INTEGERS


def _broken(item: Any) -> bool:
    return isinstance(item, str) and _SURROGATE.search(item) is not None


def _places(value: Any, wrong: Callable[[Any], bool], place: str = "") -> Iterator[tuple[str, Any]]:
    """Where in a body something is wrong; a key that is wrong counts for the object that has it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if wrong(key):
                yield place, key
            yield from _places(item, wrong, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, wrong, f"{place}[{index}]")
    elif wrong(value):
        yield place, value


def _refuse_first(body: dict[str, Any], wrong: Callable[[Any], bool], expected: str) -> None:
    for place, item in _places(body, wrong):
        raise refuse(place[:80] or None, expected, item)


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


def read(raw: bytes) -> dict[str, Any]:
    """The object that the body holds. Raises Refusal."""
    odd = False  # whether to look for the place of an odd number

    def constant(text: str) -> float:
        nonlocal odd
        odd = True
        return float(text)

    def integer(text: str) -> int:
        nonlocal odd
        value = int(text) if len(text) <= 400 else _HUGE
        odd = odd or value not in _INTEGERS
        return value

    def decimal(text: str) -> float:
        nonlocal odd
        value = float(text)
        odd = odd or not math.isfinite(value)
        return value

    try:
        text = raw.decode("utf-8")
        # a hook costs time for every number: it is only there where one could be too long
        hooks = {"parse_int": integer} if _LONG_INTEGER.search(text) else {}
        body = json.loads(text, object_pairs_hook=_once, parse_float=decimal, parse_constant=constant, **hooks)
    except UnicodeDecodeError as error:
        raise refuse(None, "UTF-8", Said(f"the byte 0x{raw[error.start]:02x} at {error.start}")) from None
    except RecursionError:
        raise _DEPTH from None
    except json.JSONDecodeError as error:
        raise Refusal(f"The body: expected JSON; {error.msg} at character {error.pos}.") from None
    if not isinstance(body, dict):
        raise refuse(None, "a JSON object", body)
    _refuse_depth(body)
    if odd:
        _refuse_first(body, _odd, "a finite number, and integers of at most 64 bits")
    if "\\ud" in text or "\\uD" in text:
        _refuse_first(body, _broken, "whole characters, no lone surrogates")
    return body
