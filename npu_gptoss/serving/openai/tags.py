"""vLLM 0.33's structural tags: the frame that harmony puts around a schema, as a grammar of llguidance's.

xgrammar leaves parts of some schemas out; and vLLM writes each tool's schema twelve times, once for each way to begin a
call: for 128 tools that takes it 12 s, and llguidance, which reads each once, 0.3 s. Its language:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from npu_gptoss.frontend.structure import parts
from npu_gptoss.serving.admission.left_out import LARK, left_out

LARGE = 1 << 16  # characters of a tag: xgrammar needs some 0.5 s
_SPECIAL = re.compile(r"(<\|\w+\|>)")


def improve(held: Any, config: Any, unsupported: Callable[[Any], bool]) -> None:
    """Replaces the tag of StructuredOutputsParams if xgrammar does not hold it, or not in time.

    config: the server's StructuredOutputsConfig. unsupported: vLLM's own check of a schema for what xgrammar does not
    know.
    """
    tag, large = json.loads(held.structural_tag), len(held.structural_tag) > LARGE
    contents, compact = [*_contents(tag)], bool(held.disable_any_whitespace or config.disable_any_whitespace)
    given = [content["json_schema"] for content in contents]
    lost = large or compact or any(left_out(schema) or unsupported(schema) for schema in given)
    lark = as_lark(tag, not compact) if config.backend == "guidance" or (config.backend == "auto" and lost) else None
    if lark:
        held.grammar, held.structural_tag = lark, None
    elif compact:  # vLLM does not pass it on with a tag
        for content in contents:
            content["max_whitespace_cnt"] = 1
        held.structural_tag = json.dumps(tag)


def _contents(node: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a tag that hold a schema."""
    if isinstance(node, list):
        for one in node:
            yield from _contents(one)
    elif isinstance(node, dict):
        if node.get("type") == "json_schema":
            yield node
        else:
            yield from _contents([node[name] for name in ("format", "elements", "content", "tags") if name in node])


def _closed(schema: Any) -> Any:
    """Returns the schema with no properties but those that it names, as xgrammar reads it."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = schema | parts(schema, _closed)
    return {"additionalProperties": False, **made} if "properties" in made else made


def as_lark(tag: Any, flexible: bool = True) -> str | None:
    """Returns the tag for llguidance; None if it has a part in another language. flexible: JSON may have spaces."""
    rules: dict[str, str] = {}  # of a schema's text, which is in a tag twelve times

    def json_rule(node: Any) -> str:
        return rules.setdefault(json.dumps(node["json_schema"]), f"j{len(rules)}")

    def content(text: str) -> str:
        schema = json.loads(text)
        if isinstance(schema, dict):
            schema = schema if left_out(schema) else _closed(schema)
            schema |= {} if flexible else {"x-guidance": {"whitespace_flexible": False}}
        return json.dumps(schema)

    def ending(ends: Any, begin: str) -> str:
        ends = [ends] if isinstance(ends, str) else ends
        written = [_literal(end) for end in ends if end]
        if "" not in ends:
            return _either(written)
        return _either([*written, "<|call|>"] if "to=" in begin else written) + "?"  # or a token that ends the turn

    def tagged(node: Any) -> str:
        return f"{_literal(node['begin'])} {made(node['content'])} {ending(node['end'], node['begin'])}"

    kinds: dict[str, Callable[[Any], str]] = {
        "const_string": lambda node: _literal(node["value"]),
        "any_text": lambda node: "TEXT?",
        "json_schema": json_rule,
        "sequence": lambda node: " ".join(map(made, node["elements"])),
        "or": lambda node: _either([*map(made, node["elements"])]),
        "optional": lambda node: f"({made(node['content'])})?",
        "tag": tagged,
    }

    def made(node: Any) -> str:
        return kinds[node["type"]](node)

    try:
        start = made(tag["format"])
    except KeyError:
        return None
    lines = [f"start: {start}", "TEXT: /(.|\\n)+/", *(f"{name}: %json {content(text)}" for text, name in rules.items())]
    return LARK + "\n".join(lines) + "\n"


def _either(ways: list[str]) -> str:
    return f"({' | '.join(ways)})"


def _literal(text: str) -> str:
    parts = [part if _SPECIAL.fullmatch(part) else json.dumps(part) for part in _SPECIAL.split(text) if part]
    return " ".join(parts) or '""'
