"""Rules of which the table of fields is made: each says what it expects, and finds what in a value is otherwise.

A rule looks at values that vLLM's own reading would take: "7" and 7.0 are numbers there, so they are here. A value
of another type is left to vLLM's answer, except where vLLM looks at it before it knows the type (`strict`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal, Said, refuse


@dataclass(frozen=True)
class Limits:
    """What this server's model and options bound."""

    vocab_size: int  # rows of the logits: ids are below
    tokenizer_size: int  # ids that the tokenizer knows are below
    max_model_len: int
    max_logprobs: int  # -1: any number
    prompt_embeds: bool = False
    chat_templates: bool = False  # --trust-request-chat-template
    elastic: bool = False  # --data-parallel-backend ray
    max_n: int = 128
    max_prompts: int = 1024

    @property
    def last_token(self) -> int:
        return self.vocab_size - 1


Rule = Callable[[Any, Limits, str], None]  # raises Refusal; gets the value, the limits and the field's name
Bound = int | float | str | None  # a number, or the name of a field of Limits


def as_number(value: Any) -> int | float | None:
    """The number as which vLLM would take this; None when it would take none."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    return None


def _bound(bound: Bound, limits: Limits) -> int | float | None:
    return getattr(limits, bound) if isinstance(bound, str) else bound


def number(
    low: Bound, high: Bound = None, *, above: bool = False, strict: bool = False, noun: str = "a number"
) -> Rule:
    """Between both bounds, which are included (the lower one not if `above`), and finite."""

    def rule(value: Any, limits: Limits, name: str) -> None:
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

    return rule


def integer(low: Bound, high: Bound = None, *, strict: bool = False) -> Rule:
    return number(low, high, strict=strict, noun="an integer")


def logprobs(*, least: int = 0, strict: bool = True) -> Rule:
    """How many alternatives; -1 is the whole vocabulary, which only a server without a bound gives."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        free = limits.max_logprobs == -1
        most = limits.vocab_size if free else limits.max_logprobs
        integer(-1 if free and least < 0 else 0, most, strict=strict)(value, limits, name)

    return rule


def token_ids(below: str, most: int | None = None, *, empty: bool = True) -> Rule:
    """A list of ids of the vocabulary."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        if not isinstance(value, list):
            return
        end = getattr(limits, below)
        if most is not None and len(value) > most:
            raise refuse(name, f"at most {most} token ids", Said(f"{len(value)}"))
        if not value and not empty:
            raise refuse(name, "token ids", value)
        for index, item in enumerate(value):
            given = item if type(item) is int else as_number(item)
            if given is not None and not 0 <= given < end:
                raise refuse(f"{name}[{index}]", f"a token id of at least 0 and below {end}", item)

    return rule


def text(longest: int, *, strict: bool = False) -> Rule:
    def rule(value: Any, limits: Limits, name: str) -> None:
        if strict and not isinstance(value, str):
            raise refuse(name, "a string", value)
        if isinstance(value, str) and len(value) > longest:
            raise refuse(name, f"at most {longest} characters", Said(f"{len(value)}"))

    return rule


def identifier(longest: int) -> Rule:
    """Printable ASCII: it becomes a header, a key and a line of the log."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        if isinstance(value, str) and not (0 < len(value) <= longest and value.isascii() and value.isprintable()):
            raise refuse(name, f"1 to {longest} printable ASCII characters", value)

    return rule


def texts(most: int, longest: int, *, blank: bool = True) -> Rule:
    """A string or a list of strings, none of them empty; nor of white space alone, unless that may be."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        items = value if isinstance(value, list) else [value]
        if len(items) > most:
            raise refuse(name, f"at most {most} strings", Said(f"{len(items)}"))
        for index, item in enumerate(items):
            if not isinstance(item, str):
                continue
            place = f"{name}[{index}]" if isinstance(value, list) else name
            if not item or not (blank or item.strip()):
                raise refuse(
                    place, "a string that is not empty" if blank else "a string with a visible character", item
                )
            text(longest)(item, limits, place)

    return rule


def mapping(most: int, *, keys: Rule | None = None, values: Rule | None = None) -> Rule:
    def rule(value: Any, limits: Limits, name: str) -> None:
        if not isinstance(value, dict):
            return
        if len(value) > most:
            raise refuse(name, f"at most {most} entries", Said(f"{len(value)}"))
        for key, item in value.items():
            if keys is not None:
                keys(key, limits, name)
            if values is not None:
                values(item, limits, f"{name}[{json.dumps(key[:40])}]")

    return rule


def objects(most: int, fields: Mapping[str, Rule] | None = None) -> Rule:
    """A list of objects. vLLM looks into them before it knows what they are."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        if not isinstance(value, list):
            raise refuse(name, "a list of objects", value)
        if len(value) > most:
            raise refuse(name, f"at most {most} objects", Said(f"{len(value)}"))
        for index, item in enumerate(value):
            fields_of(fields or {})(item, limits, f"{name}[{index}]")

    return rule


def fields_of(fields: Mapping[str, Rule]) -> Rule:
    """An object with fields of its own rules."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        if not isinstance(value, dict):
            raise refuse(name, "an object", value)
        for field, inner in fields.items():
            if value.get(field) is not None:
                inner(value[field], limits, f"{name}.{field}")

    return rule


def size(longest: int, *, otherwise: Rule | None = None) -> Rule:
    """At most so many characters when written as JSON."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        length = len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
        if length > longest:
            raise refuse(name, f"at most {longest} characters of JSON", Said(f"{length}"))
        if otherwise is not None:
            otherwise(value, limits, name)

    return rule


def unless(option: str, reason: str) -> Rule:
    """Refused unless a field of Limits says that the server takes it."""

    def rule(value: Any, limits: Limits, name: str) -> None:
        if not getattr(limits, option) and value not in ([], {}, ""):
            raise Refusal(f"{name}: {reason}", name)

    return rule
