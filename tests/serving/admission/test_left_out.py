"""What a server holds an answer to, by xgrammar or llguidance, is what the schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_gptoss.serving.admission.left_out import left_out

llguidance = pytest.importorskip("llguidance")
xgrammar = pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.serving

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
A, B = (
    {"type": "object", "properties": {name: kind}, "required": [name]} for name, kind in (("a", TEXT), ("b", NUMBER))
)
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
# by what xgrammar leaves out of each
LEFT_OUT: dict[str, dict[str, Any]] = {
    "allOf": {"allOf": [A, B]},
    "anyOf": {"type": "object", "properties": {"a": TEXT, "b": NUMBER}, "anyOf": EITHER},
    "oneOf": {"type": "object", "properties": {"b": NUMBER}, "required": ["b"], "oneOf": [A]},
    "$ref": {"$ref": "#/$defs/x", "required": ["b"], "$defs": {"x": A}},
    "not": {"type": "object", "properties": {"a": TEXT, "b": NUMBER}, "not": {"required": ["b"]}},
    "if": A | {"if": {"properties": {"a": {"const": "b"}}}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "properties": A["properties"], "dependentRequired": {"a": ["b"]}},
    "contains": {"type": "array", "contains": TEXT},
    "uniqueItems": {"type": "array", "items": NUMBER, "uniqueItems": True},
    "pattern": {"type": "string", "pattern": "^(?!x).*$"},
    "maxItems": {"type": "array", "maxItems": 2},
    "minItems": {"type": ["array", "null"], "minItems": 1},
    "required": {"type": "object", "required": ["a"]},
    "required, of other properties": B | {"required": ["a"]},
    "minProperties": {"type": "object", "minProperties": 1},
    "maxProperties": {"type": "object", "maxProperties": 1},
}
HELD: list[Any] = [
    *(A, {"type": "object", "properties": {"a": A}}, {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": A}}),
    *({"type": "object", "anyOf": [A, B]}, {"type": ["string", "null"]}, {"enum": ["a", 1]}, {"type": "array"}),
    *({"type": "array", "items": NUMBER, "minItems": 2}, {"type": "object", "additionalProperties": NUMBER}, True),
    {"type": "object", "additionalProperties": TEXT, "minProperties": 1},
    {"type": "string", "pattern": "^a.b$"},
]
DOCUMENTS = (
    *(
        {},
        {"a": "b"},
        {"a": "c", "b": 1},
        {"a": "b", "b": 1},
        {"b": 1},
        {"b": 1, "a": "b"},
        {"a": 1},
        {"a": {"a": "b"}},
        None,
        [],
        [1],
    ),
    *([1, 2], [1, 1], [1, 2, 3], ["a"], [1, "a"], "", "a", "xb", "axb", 1),
)


def accepted(schema: Any, backend: str) -> list[Any] | None:
    """Returns the documents that a backend lets a model write; None if it refuses the schema."""
    texts = [json.dumps(document, separators=(", ", ": ")) for document in DOCUMENTS]
    if backend == "guidance":
        tokenizer = llguidance.LLTokenizer("byte")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        if llguidance.LLMatcher(tokenizer, grammar, log_level=0).get_error():
            return None
        found = []
        for document, text in zip(DOCUMENTS, texts, strict=True):
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            if matcher.try_consume_tokens([*text.encode()]) == len(text) and matcher.is_accepting():
                found.append(document)
        return found
    vocabulary = [*map(chr, range(128)), "</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[128]))
    try:
        compiled = compiler.compile_json_schema(json.dumps(schema))
    except RuntimeError:
        return None
    matchers = [xgrammar.GrammarMatcher(compiled) for _ in texts]
    return [
        document
        for document, text, matcher in zip(DOCUMENTS, texts, matchers, strict=True)
        if matcher.accept_string(text) and matcher.accept_token(128)
    ]


def valid(schema: Any) -> list[Any]:
    checked = jsonschema.Draft202012Validator(schema)
    return [document for document in DOCUMENTS if checked.is_valid(document)]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_xgrammar_leaves_out_is_held_or_refused(name: str) -> None:
    schema = LEFT_OUT[name]
    assert left_out(schema) == name.split(",")[0]
    assert left_out({"type": "object", "properties": {"of it": {"type": "array", "items": schema}}})
    held = accepted(schema, "guidance")
    assert held is None or (held and all(document in valid(schema) for document in held))  # it keeps an order


@pytest.mark.parametrize("schema", HELD, ids=json.dumps)
def test_what_xgrammar_holds_stays_with_it(schema: Any) -> None:
    assert left_out(schema) is None
    held = accepted(schema, "xgrammar")
    assert held
    assert all(document in valid(schema) for document in held)


def test_a_schema_that_is_none_raises_something() -> None:
    for odd in (5, {"type": "object", "properties": 5, "required": ["a", {}]}, {"items": 1, "anyOf": 2, "required": 3}):
        left_out(odd)


def test_xgrammar_still_leaves_them_out() -> None:
    """If it does not, `left_out` may forget about it."""
    for name, schema in LEFT_OUT.items():
        assert accepted(schema, "xgrammar") != valid(schema), name
