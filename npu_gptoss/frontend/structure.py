"""Constraints on an answer: the format that a request asks for, and calls that it forces.

A structure is a mapping with the names of vLLM's StructuredOutputsParams: one of KINDS, and options. It applies to the
text of the answer; for an engine whose grammar begins with the turn, `serving/openai/` adds harmony's framing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.frontend.tools import Tools
from npu_gptoss.harmony.conversation import ConversationError, expected, fields_of, mapping

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # a structure has one of them
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")
# deprecated fields of vLLM's -> their name in `structured_outputs`
DEPRECATED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}
FIELDS = ("response_format", "structured_outputs", "structural_tag", *DEPRECATED)  # of a request
FORMATS = "text, json_object, json_schema or structural_tag"
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Structure:
    """fields: {} if the answer is free. param: the field of the request that asks for it.

    calls: the fields describe calls that the model writes as its answer; an engine may have another way to force them.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    param: str | None = None
    calls: bool = False

    def __bool__(self) -> bool:
        return bool(self.fields)


def structure_of_format(given: Any, param: str) -> Structure:
    """Reads chat's `response_format`, `text.format` of /v1/responses or Anthropic's `output_config.format`.

    Chat has the schema within `json_schema`, the other two next to the type.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return Structure()
    schema = fields_of(fields_of(given).get("json_schema", given)).get("schema")
    if kind == "json_object" and schema is None:
        return Structure({"json_object": True}, param)
    if kind in ("json_schema", "json_object"):
        if not isinstance(schema, Mapping):
            path = f"{param}.json_schema.schema" if param == "response_format" else f"{param}.schema"
            raise expected(path, "a JSON schema", schema)
        return Structure({"json": schema}, param)
    if kind == "structural_tag":
        return Structure({"structural_tag": json.dumps(given)}, param)
    raise expected(f"{param}.type", FORMATS, kind or given)


def structure_of(body: Mapping[str, Any]) -> Structure:
    """Reads the structure that a request of chat or completions asks for. Raises ConversationError for two at once."""
    found = [structure_of_format(body.get("response_format"), "response_format")]
    found.append(_asked(mapping(body.get("structured_outputs"), "structured_outputs"), "structured_outputs"))
    deprecated = {own: body[name] for name, own in DEPRECATED.items() if body.get(name) is not None}
    if deprecated:
        kind = next((name for name, own in DEPRECATED.items() if own in deprecated and own in KINDS), "guided_json")
        found.append(_asked(deprecated, kind))
    if body.get("structural_tag") is not None:
        found.append(_asked({"structural_tag": body["structural_tag"]}, "structural_tag"))
    return only_structure(found)


def only_structure(found: Sequence[Structure]) -> Structure:
    """Raises ConversationError for two structures of one request."""
    first, *more = [structure for structure in found if structure] or [Structure()]
    if more:
        raise ConversationError(
            f"{more[0].param}: {first.param} asks for another structure already; leave one out.", more[0].param
        )
    return first


def _asked(given: Mapping[str, Any], param: str) -> Structure:
    for name in given:
        if name not in (*KINDS, *OPTIONS) and not name.startswith("_"):
            raise expected(f"{param}.{name:.80}", f"{', '.join(KINDS)} and their options", given[name])
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    kinds = [name for name in KINDS if name in fields]
    if len(kinds) > 1:
        raise expected(param, f"one of {', '.join(KINDS)}", kinds)
    if not kinds:
        return Structure()
    place = param if param.startswith(("guided_", "structural_tag")) else f"{param}.{kinds[0]}"
    return Structure(fields, place)


def forced_structure(tools: Tools, asked: Structure) -> Structure:
    """Returns `asked`, or the structure of the calls that `tool_choice` forces, which `turn.forced_calls` reads.

    Raises ConversationError if both are given.
    """
    choice = tools.choice
    if choice.mode not in ("required", "function"):
        return asked
    if asked and asked.param != "response_format" and not str(asked.param).startswith(("text", "output_config")):
        raise ConversationError(
            f"{asked.param}: tool_choice forces a call, which is another structure; leave one of them out.", asked.param
        )
    if choice.tool is None:
        return Structure({"json": _calls_schema(tools)}, "tools", calls=True)
    if choice.tool.format is not None:
        kind = {"lark": "grammar", "regex": "regex"}[choice.tool.format["syntax"]]
        return Structure({kind: choice.tool.format["definition"]}, f"{choice.tool.place}.format")
    return Structure({"json": dict(choice.tool.parameters or NO_PARAMETERS)}, "tool_choice", calls=True)


def _calls_schema(tools: Tools) -> dict[str, Any]:
    definitions, calls = {}, []
    for number, tool in enumerate(tools.offered):
        root = f"#/$defs/t{number}"
        definitions[f"t{number}"] = _moved(tool.parameters or NO_PARAMETERS, root)
        calls.append(
            {
                "properties": {"name": {"type": "string", "enum": [tool.name]}, "parameters": {"$ref": root}},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    return schema | ({} if tools.parallel else {"maxItems": 1}) | {"$defs": definitions}


def _moved(value: Any, root: str) -> Any:
    """Returns a schema whose references (`#/$defs/NAME`, `#`) hold where it is a part of another one."""
    if isinstance(value, list):
        return [_moved(one, root) for one in value]
    if not isinstance(value, Mapping):
        return value
    moved = {name: _moved(one, root) for name, one in value.items() if name != "$id" or not isinstance(one, str)}
    if isinstance(name := value.get("$ref"), str) and name.startswith("#"):
        moved["$ref"] = root + name[1:]
    return moved


# Keywords of JSON schemas by what they hold; _SIMPLE ones are known to every grammar
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_DATA = ("type", "required", "enum", "const", "$ref")
_SIMPLE = {*_SCHEMAS, *_NAMED} - {"prefixItems", "patternProperties"}


def parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the keywords of a schema that hold schemas, or lists of them, each changed."""
    named = {name: schema[name] for name in _NAMED if isinstance(schema.get(name), Mapping)}
    made = {name: {key: change(one) for key, one in value.items()} for name, value in named.items()}
    return made | {name: change(schema[name]) for name in _SCHEMAS if name in schema}


def shape(schema: Any) -> Any:
    """Returns a schema without keywords that some grammars refuse (`uniqueItems`, `pattern`, `format`)."""
    if isinstance(schema, list):
        return [shape(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = parts({name: value for name, value in schema.items() if name in _SIMPLE}, shape)
    return made | {name: schema[name] for name in _DATA if name in schema}
