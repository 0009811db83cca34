"""The JSON schemas of tools, as the prompt shows them.

harmony's TypeScript has `any` for `$ref`, `allOf`, `anyOf` and `const`, which pydantic and zod write for each nested,
optional or literal argument, and for an object without `type`, with `type` in capitals or with `oneOf` beside its
properties, which MCP servers write: the model would have to guess its arguments. OpenAI's own API reads or refuses
them. A reference that is recursive, dangling or part of a schema that grows too large stays `any`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# References that double at each level could make any number of schemas, and openai-harmony reads 128 levels
MOST, DEEPEST = 2000, 16
COPIED = 1 << 16  # characters of what the ways of `anyOf` and `oneOf` have in common
SIMPLE = {"type", "title"}
SHAPE = ("type", "properties", "required", "items")
SHOWN = {"type", "properties", "items", "enum", "oneOf"}
NOTES = {"title", "description"}


def written_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema in the keywords that harmony writes. Raises TypeError or RecursionError for odd ones."""
    return _Writer(schema).schema({name: schema[name] for name in schema if name not in ("$defs", "definitions")})


class _Writer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MOST
        self._room = COPIED

    def schema(self, given: Any, within: tuple[str, ...] = ()) -> Any:
        """within: the references that led here."""
        if not isinstance(given, Mapping):
            return given
        self._left -= 1
        if self._left < 0:
            return {}
        made = dict(given)
        if isinstance(name := made.get("$ref"), str):
            del made["$ref"]
            found = None if name in within or len(within) == DEEPEST else self._found(name)
            return made if found is None else self.schema({**found, **made}, (*within, name))
        if isinstance(properties := made.get("properties"), Mapping):
            made["properties"] = {name: self.schema(value, within) for name, value in properties.items()}
        if "items" in made:
            made["items"] = self.schema(made["items"], within)
        parts, choices, others = (
            [self.schema(one, within) for one in made.pop(name, None) or ()] for name in ("allOf", "anyOf", "oneOf")
        )
        for part in reversed(parts):
            made = _both(part, made)
        _set_type(made)
        if others := self._ways(others, made):
            made["oneOf"] = others
        if choices := self._ways(choices, made):
            made = _either(choices, made)
        values = made.setdefault("enum", [made["const"]]) if "const" in made else made.get("enum")
        if values and all(isinstance(value, str) for value in values):
            made.setdefault("type", "string")
        return made

    def _ways(self, ways: list[Any], made: Mapping[str, Any]) -> list[Any]:
        """Returns the ways with the shape that all have in common, which harmony does not write beside them.

        A way that is a condition (`required`, `format`) shows nothing and is dropped.
        """
        ways = [way for way in ways if isinstance(way, Mapping) and (way.keys() & SHOWN or way.keys() <= NOTES)]
        common = {name: made[name] for name in SHAPE if name in made}
        self._room -= len(json.dumps(common)) * len(ways) if "properties" in common else 0
        return [_both(common, way) for way in ways] if self._room > 0 else ways

    def _found(self, name: str) -> Mapping[str, Any] | None:
        """Returns the schema at a JSON pointer."""
        found: Any = self._root
        for key in name.split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if name.startswith("#") and isinstance(found, Mapping) else None


def _set_type(made: dict[str, Any]) -> None:
    kind = made.get("type")
    if isinstance(kind, list) and len(known := [one for one in kind if one != "null"]) == 1:
        kind, made["nullable"] = known[0], len(kind) > 1
    if kind is None:
        kind = "object" if "properties" in made else "array" if "items" in made else None
    if kind is not None:
        made["type"] = kind.lower() if isinstance(kind, str) else kind


def _both(part: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    both: dict[str, Any] = {**part, **made}
    if "properties" in both:
        both["properties"] = {**part.get("properties", {}), **made.get("properties", {})}
    if "required" in both:
        both["required"] = [*part.get("required", ()), *made.get("required", ())]
    return both


def _either(choices: list[Mapping[str, Any]], made: dict[str, Any]) -> dict[str, Any]:
    if all(SIMPLE >= choice.keys() >= {"type"} for choice in choices):
        return made | {"type": [choice["type"] for choice in choices]}
    known = [choice for choice in choices if choice.get("type") != "null"]
    if len(known) == 1:
        return _both({**known[0], "nullable": len(choices) > 1}, made)
    return made | {"oneOf": choices}
