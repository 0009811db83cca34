"""Structures: calls that a request forces have the arguments that their tools describe."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("openai_harmony")
pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator

from npu_gptoss.frontend import chat

WORD = {"type": "string"}


def tool(name: str, schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def read(*tools: dict[str, Any], **fields: Any) -> Any:
    return chat.read({"messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}).asked


def fits(schema: dict[str, Any], name: str, arguments: Any) -> bool:
    return Draft202012Validator(schema).is_valid([{"name": name, "parameters": arguments}])


def test_references_of_a_tool_are_looked_up_in_the_list_of_calls() -> None:
    """A schema with `definitions` was refused, and `#` meant the list."""

    def of(name: str) -> dict[str, Any]:
        item = {"type": "object", "properties": {name: WORD}, "required": [name]}
        return {"type": "object", "properties": {"item": {"$ref": "#/definitions/Item"}}, "definitions": {"Item": item}}

    tree = {"type": "object", "properties": {"in": {"type": "array", "items": {"$ref": "#"}}}, "required": ["in"]}
    asked = read(tool("f", of("a")), tool("g", of("b")), tool("h", tree), tool_choice="required")
    schema = asked.structure.fields["json"]
    assert fits(schema, "f", {"item": {"a": "x"}})
    assert not fits(schema, "f", {"item": {"b": "x"}})
    assert fits(schema, "g", {"item": {"b": "x"}})
    assert not fits(schema, "g", {"item": {"a": "x"}})
    assert fits(schema, "h", {"in": [{"in": []}]})
    assert not fits(schema, "h", {"in": [{}]})


def test_a_schema_that_no_grammar_holds_is_kept_or_a_strict_one_dropped() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = tool("f", bad), tool("g", bad, strict=True)
    required = read(*tools, tool_choice="required").loosened.structure.fields["json"]["$defs"]
    assert ["uniqueItems" in str(required[name]) for name in ("t0", "t1")] == [False, True]
    named = {"type": "function", "function": {"name": "f"}}
    assert "uniqueItems" not in str(read(*tools, tool_choice=named).loosened.structure.fields)
    auto = read(*tools).loosened
    assert not any(word in str(auto.tools.functions) for word in ("uniqueItems", "strict"))
