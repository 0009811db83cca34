# ruff: noqa: E501
"""What the observations of `observations.py` see: in the released vLLM, and with the diff that is about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A defect: what is seen without the diff and with it."""

    before: Any
    after: Any


def expected(values: dict[str, Any], repaired: bool) -> dict[str, Any]:
    return {
        name: (value.after if repaired else value.before) if isinstance(value, Change) else value
        for name, value in values.items()
    }


# observation -> what was looked at -> a Change, or the value that the diff must leave as it is
EXPECTED: dict[str, dict[str, Any]] = {
    "yarn_truncate": {
        "truncate: false": Change(
            9,
            0,
        ),
        "truncate: true": 0,
    },
    "cpu_sliding_window": {
        "V1 serves a model with a window": Change(
            False,
            True,
        ),
        "refused": Change(
            ["sliding window (CPU backend)"],
            [],
        ),
        "vLLM's own decoder layer with a window": Change(
            128,
            "NotImplementedError",
        ),
        "without": None,
        "an encoder's with one": 128,
    },
    "cpu_grammar_bitmask": {
        "torch.float32": [["all"], [3, 40]],
        "torch.bfloat16": Change(
            "ValueError",
            [["all"], [3, 40]],
        ),
    },
    "reasoning_end": {
        "a turn after an answer": Change(
            True,
            False,
        ),
        "its reasoning": Change(
            True,
            False,
        ),
        "its answer": True,
        "inside its answer": True,
        "a header for JSON": Change(
            False,
            True,
        ),
        "half a header": False,
        "a call": False,
    },
    "harmony_after_turn": {
        "chat": Change(
            "HarmonyError",
            "Four.",
        ),
        "stream": Change(
            {
                "content": "Four.",
                "reasoning": "hm",
                "calls": [],
                "error": "Unexpected token 200002 while expecting start token 200006",
            },
            {"content": "Four.", "reasoning": "hm", "calls": []},
        ),
        "response": Change(
            "Unexpected token 200002 while expecting start token 200006",
            ["reasoning", "message"],
        ),
        "events": Change(
            "HarmonyError",
            ["response.output_item.done", "response.output_item.done", "response.completed"],
        ),
        "after a tool of the server": ["{}", "a page", "Found."],
    },
    "harmony_channels": {
        "answer alone": Change(
            ["Four.", ""],
            [None, "Four."],
        ),
        "cut off": Change(
            ["Fo", None],
            [None, "Fo"],
        ),
        "reasoning cut off": ["h", None],
        "both": ["hm", "Four."],
        "call": Change(
            ["hm", '{"city": "Paris"}'],
            ["hm", None],
        ),
        "response with a preamble": Change(
            "Unknown recipient: None",
            ["message", "function_call"],
        ),
        "preamble cut off": Change(
            [],
            ["message"],
        ),
    },
    "chat_prompt": {
        "user": Change(
            "<|start|>developer<|message|><|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
            "<|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
        "system": Change(
            "<|start|>developer<|message|><|end|><|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
        "system and tools": Change(
            "<|start|>developer<|message|>",
            "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n",
        ),
        "earlier answer": Change(
            "<|start|>developer<|message|><|end|><|start|>user<|message|>Hello<|end|><|start|>assistant<|message|>Hi.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
            "<|start|>user<|message|>Hello<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
        "result": Change(
            "<|start|>developer<|message|><|end|><|start|>user<|message|>Hello<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|><|start|>functions.<|channel|>commentary<|message|>20 degrees<|end|><|start|>assistant",
            "<|start|>user<|message|>Hello<|end|><|start|>assistant<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20 degrees<|end|><|start|>assistant",
        ),
        "result of no call": Change(
            "<|start|>developer<|message|><|end|><|start|>user<|message|>Hello<|end|><|start|>functions.<|channel|>commentary<|message|>20 degrees<|end|><|start|>assistant",
            "No tool call found for the tool_call_id 'call_1' None",
        ),
    },
    "responses_prompt": {
        "instructions": Change(
            "<|start|>user<|message|>Hello<|end|><|start|>assistant",
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
        "system": Change(
            "<|start|>developer<|message|>Instructions:\nBe brief.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
        "result": Change(
            "No call message found for c None",
            "<|start|>user<|message|>Hello<|end|><|start|>assistant<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20 degrees<|end|><|start|>assistant",
        ),
        "reasoning without text": Change(
            "KeyError",
            "<|start|>user<|message|>Hello<|end|><|start|>user<|message|>Hello<|end|><|start|>assistant",
        ),
    },
    "chat_stream": {
        "one token an output": {"content": "", "reasoning": "hm", "calls": [["get_weather", '{"city": "Paris"}']]},
        "all in one output": Change(
            {"content": "", "reasoning": "", "calls": []},
            {"content": "Four.", "reasoning": "hm", "calls": []},
        ),
        "call in one output": Change(
            {"content": "", "reasoning": "", "calls": []},
            {"content": "", "reasoning": "hm", "calls": [["get_weather", '{"city": "Paris"}']]},
        ),
        "two calls, three tokens an output": Change(
            {"content": "", "reasoning": "", "calls": [["get_weather", ' "'], ["get_weather", '":"}']]},
            {
                "content": "",
                "reasoning": "hm",
                "calls": [["get_weather", '{"city": "Paris"}'], ["get_weather", '{"city": "Paris"}']],
            },
        ),
        "preamble": Change(
            {"content": "", "reasoning": "", "calls": [["get_weather", '{"city": "Paris"}']]},
            {"content": "Let me look.", "reasoning": "", "calls": [["get_weather", '{"city": "Paris"}']]},
        ),
        "call on the analysis channel": Change(
            {"content": "", "reasoning": '{"city": "Rome"}', "calls": []},
            {"content": "", "reasoning": "", "calls": [["get_weather", '{"city": "Rome"}']]},
        ),
        "call cut off": Change(
            {
                "content": "",
                "reasoning": "hm",
                "calls": [["get_weather", '{"city": "']],
                "error": "list index out of range",
            },
            {"content": "", "reasoning": "hm", "calls": [["get_weather", '{"city": "Paris']]},
        ),
        "output without tokens": Change(
            {"content": "cut off off", "reasoning": "", "calls": []},
            {"content": "cut off", "reasoning": "", "calls": []},
        ),
        "reasoning left out": Change(
            {"content": ".", "reasoning": "", "calls": []},
            {"content": "Four.", "reasoning": "", "calls": []},
        ),
    },
    "tool_answers": {
        "cut off": Change(
            [None, []],
            ["Fo", []],
        ),
        "preamble": Change(
            [None, [["get_weather", '{"city": "Paris"}']]],
            ["Let me look.", [["get_weather", '{"city": "Paris"}']]],
        ),
        "required": Change(
            ['[{"name": "get_weather", "parameters": {"city": "Zürich"}}]', []],
            [None, [["get_weather", '{"city": "Zürich"}']]],
        ),
        "required, cut off": Change(
            [None, []],
            ['[{"name":', []],
        ),
        "named": Change(
            ['{"city": "Rome"}', []],
            [None, [["get_weather", '{"city": "Rome"}']]],
        ),
        "named, called": [None, [["get_weather", '{"city": "Paris"}']]],
        "not forced": ['[{"name": "get_weather", "parameters": {"city": "Zürich"}}]', []],
    },
    "tools_without_flags": {
        "whole": Change(
            [],
            [["get_weather", '{"city": "Paris"}']],
        ),
        "streamed": [["get_weather", '{"city": "Paris"}']],
    },
    "responses_stream_tokens": {
        "1 an output": ["hm", "Four.", 2, True],
        "3 an output": Change(
            ["", ".", 1, True],
            ["hm", "Four.", 2, True],
        ),
        "100 an output": Change(
            ["", "", 1, True],
            ["hm", "Four.", 2, True],
        ),
    },
    "responses_stream_end": {
        "whole": "completed",
        "cut off": Change(
            "completed",
            "incomplete",
        ),
        "aborted without a token": Change(
            "UnboundLocalError",
            ["cancelled", "cut off"],
        ),
    },
    "responses_stream_indices": {
        "items": Change(
            [[1, "reasoning"], [3, "message"]],
            [[0, "reasoning"], [1, "message"]],
        ),
        "parts": Change(
            [0, 1],
            [0],
        ),
        "OpenAI's client": Change(
            "IndexError",
            "Four.",
        ),
    },
}

EXPECTED_ON_ASCEND: dict[str, dict[str, Any]] = {
    "decode_query_list": {
        "query ends": Change(
            [1, 2, 3, 4],
            [1, 2, 3, 4, 5],
        ),
        "key lengths": [5, 6, 7, 1, 1],
        "on the device": Change(
            [0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4, 5],
        ),
        "without padding": [1, 2, 3],
    },
    "attention_sinks": {
        "PrefillNoCache, no sinks": True,
        "PrefillNoCache, sinks": Change(
            False,
            True,
        ),
        "PrefillNoCache, and window": Change(
            False,
            True,
        ),
        "ChunkedPrefill, no sinks": True,
        "ChunkedPrefill, sinks": Change(
            False,
            True,
        ),
        "ChunkedPrefill, and window": Change(
            False,
            True,
        ),
        "DecodeOnly, no sinks": True,
        "DecodeOnly, sinks": Change(
            False,
            True,
        ),
        "DecodeOnly, and window": Change(
            False,
            True,
        ),
    },
    "moe_bias_activation": {
        "silu without biases": True,
        "silu with biases": Change(
            False,
            True,
        ),
        "swigluoai without biases": Change(
            False,
            True,
        ),
        "swigluoai with biases": Change(
            False,
            True,
        ),
        "an activation that is not known": Change(
            False,
            True,
        ),
    },
    "rope_buffer": {
        "torch.float32 asked for": Change(
            {"right": True, "buffer replaced in forward": True, "bytes of a row": 256},
            {"right": True, "buffer replaced in forward": False, "bytes of a row": 128},
        ),
        "torch.bfloat16 asked for": {"right": True, "buffer replaced in forward": False, "bytes of a row": 128},
    },
    "yarn_truncate": {
        "truncate": Change(
            "got an unexpected keyword argument 'truncate'",
            [False, True],
        ),
    },
    "quantization_claim": {
        "mxfp4": Change(
            "ascend",
            None,
        ),
        "mxfp4, with --quantization ascend": "ascend",
        "ascend": "ascend",
        "no method named": "ascend",
        "what the platform says of mxfp4": "mxfp4 quantization is currently not supported in npu.",
    },
}
