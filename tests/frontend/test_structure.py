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


def test_a_forced_call_of_a_schema_without_type_may_be_no_object() -> None:
    asked = read(tool("f", {"properties": {"a": WORD}}), tool_choice="required")
    assert not fits(asked.structure.fields["json"], "f", "x")


def test_a_client_that_takes_one_call_is_not_forced_to_read_two() -> None:
    call = {"name": "f", "parameters": {}}
    for parallel in (True, False):
        asked = read(tool("f", {"type": "object"}), tool_choice="required", parallel_tool_calls=parallel)
        assert Draft202012Validator(asked.structure.fields["json"]).is_valid([call, call]) is parallel


def test_a_schema_that_no_grammar_holds_is_kept_or_a_strict_one_dropped() -> None:
    words = {"type": "array", "items": WORD | {"pattern": "(?=a)"}, "uniqueItems": True}
    bad = {"type": "object", "properties": {"pattern": words}, "required": ["pattern"]}
    tools = tool("f", bad), tool("g", bad, strict=True)
    part, nothing = read(*tools, tool_choice="required").loosened()
    kept = {"type": "object", "properties": {"pattern": {"type": "array", "items": WORD}}, "required": ["pattern"]}
    for asked, of_f in (part, kept), (nothing, {"type": "object", "properties": {}}):
        assert asked.structure.fields["json"]["$defs"] == {"t0": of_f, "t1": bad}
    named = {"type": "function", "function": {"name": "f"}}
    assert next(read(*tools, tool_choice=named).loosened()).structure.fields["json"] == kept
    part, nothing = read(*tools).loosened()
    assert [one["function"]["strict"] for one in part.tools.functions if "strict" in one["function"]] == [True]
    assert not any(word in str(nothing.tools.functions) for word in ("parameters", "strict"))
