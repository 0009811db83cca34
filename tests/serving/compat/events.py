"""The events of a streamed response of /v1/responses, read as OpenAI's specification has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENT = TypeAdapter(ResponseStreamEvent)


def shapes(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without their ids, which are random."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def sent(events: Sequence[Any]) -> list[dict[str, Any]]:
    """The events as they travel."""
    return [json.loads(event.model_dump_json()) for event in events]


def built(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a whole stream tells piece by piece; each piece has to fit those before it and the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1]["response"]
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        EVENT.validate_python(event)  # a type of the specification with all of its fields
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        if kind == "response.output_item.done":
            assert shapes([event["item"]]) == shapes([item | {"status": event["item"]["status"]}])
            assert event["item"] == response["output"][event["output_index"]]
            items[event["output_index"]] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        assert event.get("content_index", 0) == 0
        if kind == "response.function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind == "response.content_part.added":
            item["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            item["content"][0]["text"] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
        else:
            assert kind == "response.content_part.done"
            assert event["part"] == item["content"][0]
    return items
