"""Validators for request fields. Each states the expected value and describes the actual one.

A validator checks every value that vLLM's parser would accept, so "7" and 7.0 count as numbers. vLLM itself answers
for values of another type, unless it uses them before it checks the type (`strict`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal, Said, refuse


@dataclass(frozen=True)
class Limits:
    """Limits that come from this server's model and options."""

    vocab_size: int  # rows of the logits; ids are smaller
    tokenizer_size: int  # the tokenizer's ids are smaller
    max_model_len: int
    max_logprobs: int  # -1: any number
    prompt_embeds: bool = False
    chat_templates: bool = False  # --trust-request-chat-template
    elastic: bool = False  # --enable-elastic-ep, or with vLLM 0.11 --data-parallel-backend ray
    max_n: int = 128
    max_prompts: int = 1024

    @property
    def last_token(self) -> int:
        return self.vocab_size - 1


Rule = Callable[[Any, Limits, str], None]  # raises Refusal; takes the value, the limits and the field's name
Bound = int | float | str | None  # a number, or the name of a field of Limits


def rule(check: Callable[..., None]) -> Callable[..., Rule]:
    """Turns a check into a maker of rules: its arguments are the check's arguments after the first three."""

    @functools.wraps(check)
    def with_bounds(*bounds: Any, **options: Any) -> Rule:
        return lambda value, limits, name: check(value, limits, name, *bounds, **options)

    return with_bounds


def as_number(value: Any) -> int | float | None:
    """Returns the number that vLLM would read from this value; None if it would refuse it."""
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return None


def _bound(bound: Bound, limits: Limits) -> int | float | None:
    return getattr(limits, bound) if isinstance(bound, str) else bound


def at_most(most: int, what: str, count: int, name: str) -> None:
    if count > most:
        raise refuse(name, f"at most {most} {what}", Said(f"{count}"))


@rule
def number(
    value: Any,
    limits: Limits,
    name: str,
    low: Bound,
    high: Bound = None,
    *,
    above: bool = False,
    strict: bool = False,
    noun: str = "a number",
) -> None:
    """Accepts finite numbers between the limits, which are included (the lower one unless `above`)."""
    if strict and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise refuse(name, noun, value)
    given = as_number(value)
    if given is None:
        return
    least, most = _bound(low, limits), _bound(high, limits)
    if (
        not math.isfinite(given)
        or (least is not None and (given <= least if above else given < least))
        or (most is not None and given > most)
    ):
        words = [f"above {least}" if above else f"of at least {least}"] if least is not None else []
        words += [f"at most {most}"] if most is not None else []
        raise refuse(name, f"{noun} {' and '.join(words)}" if words else "a finite number", value)


integer = functools.partial(number, noun="an integer")


@rule
def logprobs(value: Any, limits: Limits, name: str, *, least: int = 0) -> None:
    """Checks the number of alternatives; -1 asks for the whole vocabulary and needs a server without a limit."""
    free = limits.max_logprobs == -1
    most = limits.vocab_size if free else limits.max_logprobs
    integer(-1 if free and least < 0 else 0, most, strict=True)(value, limits, name)


@rule
def token_ids(
    value: Any, limits: Limits, name: str, below: str, most: int | None = None, *, empty: bool = True
) -> None:
    """Accepts a list of ids of the vocabulary."""
    if not isinstance(value, list):
        return
    end = getattr(limits, below)
    if most is not None:
        at_most(most, "token ids", len(value), name)
    if not value and not empty:
        raise refuse(name, "token ids", value)
    for index, item in enumerate(value):
        given = item if type(item) is int else as_number(item)
        if given is not None and not 0 <= given < end:
            raise refuse(f"{name}[{index}]", f"a token id of at least 0 and below {end}", item)


@rule
def text(value: Any, limits: Limits, name: str, longest: int, *, strict: bool = False) -> None:
    if isinstance(value, str):
        at_most(longest, "characters", len(value), name)
    elif strict:
        raise refuse(name, "a string", value)


@rule
def identifier(value: Any, limits: Limits, name: str, longest: int) -> None:
    """Accepts printable ASCII, because the value becomes a header, a key and a log entry."""
    if isinstance(value, str) and not (0 < len(value) <= longest and value.isascii() and value.isprintable()):
        raise refuse(name, f"1 to {longest} printable ASCII characters", value)


@rule
def texts(value: Any, limits: Limits, name: str, most: int, longest: int, *, blank: bool = True) -> None:
    """Accepts a non-empty string or a list of them. `blank`: white space alone is accepted."""
    items = value if isinstance(value, list) else [value]
    at_most(most, "strings", len(items), name)
    for index, item in enumerate(items):
        place = f"{name}[{index}]" if isinstance(value, list) else name
        if isinstance(item, str) and not (item if blank else item.strip()):
            raise refuse(place, "a string that is not empty" if blank else "a string with a visible character", item)
        text(longest)(item, limits, place)


@rule
def mapping(
    value: Any, limits: Limits, name: str, most: int, *, keys: Rule | None = None, values: Rule | None = None
) -> None:
    if not isinstance(value, dict):
        return
    at_most(most, "entries", len(value), name)
    for key, item in value.items():
        if keys is not None:
            keys(key, limits, name)
        if values is not None:
            values(item, limits, f"{name}[{json.dumps(key[:40])}]")


@rule
def objects(
    value: Any, limits: Limits, name: str, most: int, fields: Mapping[str, Rule] | None = None, *, empty: bool = True
) -> None:
    """Accepts a list of objects. vLLM uses them before it checks their type."""
    if not isinstance(value, list) or not (value or empty):
        raise refuse(name, "a list of objects" if empty else "a list of at least one object", value)
    at_most(most, "objects", len(value), name)
    for index, item in enumerate(value):
        fields_of(fields or {})(item, limits, f"{name}[{index}]")


@rule
def fields_of(value: Any, limits: Limits, name: str, fields: Mapping[str, Rule]) -> None:
    """Checks the fields of an object by their own rules."""
    if not isinstance(value, dict):
        raise refuse(name, "an object", value)
    for field, inner in fields.items():
        if value.get(field) is not None:
            inner(value[field], limits, f"{name}.{field}")


@rule
def size(value: Any, limits: Limits, name: str, longest: int, *, otherwise: Rule | None = None) -> None:
    """Accepts at most so many characters when written as JSON."""
    length = len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
    at_most(longest, "characters of JSON", length, name)
    if otherwise is not None:
        otherwise(value, limits, name)


@rule
def unless(value: Any, limits: Limits, name: str, option: str, reason: str) -> None:
    """Refuses the field unless the named field of Limits permits it."""
    if not getattr(limits, option) and value not in ([], {}, ""):
        raise Refusal(f"{name}: {reason}", name)
