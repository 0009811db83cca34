"""What xgrammar leaves out of a JSON schema without a word. llguidance holds it, or refuses it by name.

Measured with xgrammar 0.1.25 to 0.2.8 against jsonschema: tests/serving/admission/test_left_out.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_gptoss.frontend.structure import parts

LARK = "%llguidance {}\n"  # begins a grammar that only llguidance reads
# keywords that it does not read
_UNREAD = ("not", "if", "dependentRequired", "dependentSchemas", "contains", "uniqueItems")
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")  # of which it reads the first, and nothing beside it
_BESIDE = ("properties", "required", "items", "prefixItems", "enum", "const", "pattern", "minimum", "maximum")
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!")


def left_out(schema: Any) -> str | None:
    """Returns a keyword of the schema that xgrammar would not enforce, or so that only `[]` or `{}` is left."""
    if isinstance(schema, list):
        return next(filter(None, map(left_out, schema)), None)
    if not isinstance(schema, Mapping):
        return None
    if (found := _of_this(schema)) is not None:
        return found
    inner: list[str | None] = []
    parts(schema, lambda one: inner.append(left_out(one)))
    return next(filter(None, inner), None)


def _of_this(schema: Mapping[str, Any]) -> str | None:
    for name in _UNREAD:
        if schema.get(name) not in (None, False):
            return name
    ways = [name for name in _ALTERNATIVES if name in schema]
    if ways and (len(ways) > 1 or any(name in schema for name in _BESIDE)):
        return ways[-1]
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "allOf"
    if isinstance(schema.get("pattern"), str) and any(one in schema["pattern"] for one in _LOOKING):
        return "pattern"
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "array" in kinds and "items" not in schema and "prefixItems" not in schema:
        return next((name for name in ("minItems", "maxItems") if name in schema), None)
    if "object" not in kinds or ways:
        return None
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, Mapping) else {}
    if isinstance(required, list) and any(isinstance(one, str) and one not in named for one in required):
        return "required"
    if not properties and not {"additionalProperties", "patternProperties"} & schema.keys():
        return next((name for name in ("minProperties", "maxProperties") if name in schema), None)
    return None
