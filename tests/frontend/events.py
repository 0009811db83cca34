"""Reads the events of a streamed /v1/responses answer by OpenAI's specification."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT = TypeAdapter(ResponseStreamEvent)
ARGUMENTS = {"response.function_call_arguments": "arguments", "response.custom_tool_call_input": "input"}
RANDOM = ("id", "call_id")


def shapes(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes the items' ids, which are random."""
    return [{key: value for key, value in item.items() if key not in RANDOM} for item in items]


def built(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Builds the items from a stream's pieces. Each piece must fit the earlier pieces and the last event."""
    events = deepcopy(events)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    Response.model_validate(response)
    items: list[dict[str, Any]] = []
    for event in events[2:-1]:
        EVENT.validate_python(event)  # a type of the specification with all of its fields
        kind, _, what = event["type"].rpartition(".")
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        if event["type"] == "response.output_item.done":
            # known at the end only
            late = {name: event["item"][name] for name in ("status", "encrypted_content") if name in item}
            assert event["item"] == item | late == response["output"][event["output_index"]]
            items[event["output_index"]] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        assert event.get("content_index", 0) == 0
        if kind in ARGUMENTS and what == "delta":
            item[ARGUMENTS[kind]] += event["delta"]
        elif kind in ARGUMENTS:
            assert event[ARGUMENTS[kind]] == item[ARGUMENTS[kind]]
            assert event.get("name", item["name"]) == item["name"]
        elif event["type"] == "response.content_part.added":
            item["content"].append(event["part"])
        elif event["type"] == "response.content_part.done":
            assert event["part"] == item["content"][0]
        elif what == "delta":
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        else:
            assert what == "done"
            assert event["text"] == item["content"][0]["text"]
            assert event.get("logprobs", []) == item["content"][0].get("logprobs", [])
    return items
