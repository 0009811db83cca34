"""vLLM's serving objects over an engine that says what a test tells it to say, in as large bites as the test likes."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_responses import OpenAIServingResponses
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

MODEL = "gpt-oss"
LIMIT = 4096  # tokens of the context
TURN_ENDS = (200002, 200012)  # <|return|>, <|call|>


class FakeTokenizer:
    def decode(self, tokens: int | list[int]) -> str:
        return f"decoded {tokens}"

    def get_vocab(self) -> dict[str, int]:
        return {}


class FakeEngine:
    """Generates the given tokens, `bite` tokens an output when streamed, and records what it was asked for."""

    errored = False

    def __init__(
        self,
        tokens: Sequence[int] | Sequence[Sequence[int]],
        bite: int = 1,
        finish: str | None = None,
        empty_end: bool = False,
    ) -> None:
        self.choices = [list(tokens)] if not tokens or isinstance(tokens[0], int) else [list(part) for part in tokens]
        self.bite, self.finish, self.empty_end = bite, finish, empty_end
        self.prompts: list[list[int]] = []
        self.closed = False

    async def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def _output(self, index: int, tokens: list[int], logprobs: bool, end: bool) -> CompletionOutput:
        reason = self.finish or ("stop" if self.choices[index][-1] in TURN_ENDS else "length")
        return CompletionOutput(
            index=index,
            text="",
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=[{token: Logprob(-token / 1e6, 1, f"<{token}>")} for token in tokens] if logprobs else None,
            finish_reason=reason if end else None,
        )

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.prompts.append(list(prompt["prompt_token_ids"]))
        logprobs = sampling_params.logprobs is not None
        streamed = sampling_params.output_kind == RequestOutputKind.DELTA
        longest = max(map(len, self.choices))
        bite = self.bite if streamed else longest
        try:
            for first in range(0, longest, bite):
                outputs = []
                for index, tokens in enumerate(self.choices):
                    part = tokens[first : first + bite]
                    end = first + bite >= len(tokens) and not (streamed and self.empty_end)
                    if part:
                        outputs.append(self._output(index, part, logprobs, end))
                finished = first + bite >= longest and not (streamed and self.empty_end)
                yield self._request_output(request_id, prompt, outputs, finished)
                await asyncio.sleep(0)
            if streamed and self.empty_end:
                yield self._request_output(request_id, prompt, [self._output(0, [], logprobs, True)], True)
        finally:
            self.closed = True

    def _request_output(self, request_id: str, prompt: Any, outputs: list[CompletionOutput], finished: bool) -> Any:
        return RequestOutput(request_id, None, prompt["prompt_token_ids"], None, outputs, finished, num_cached_tokens=0)


def _common(engine: FakeEngine, model_type: str) -> dict[str, Any]:
    config = types.SimpleNamespace(
        max_model_len=LIMIT,
        hf_config=types.SimpleNamespace(model_type=model_type),
        model=MODEL,
        tokenizer=MODEL,
        revision=None,
        generation_config="auto",
        logits_processor_pattern=None,
        get_diff_sampling_param=dict,
    )
    models = types.SimpleNamespace(
        is_base_model=lambda name: True, model_name=lambda lora=None: MODEL, lora_requests={}, static_lora_modules=()
    )
    return {
        "engine_client": engine,
        "model_config": config,
        "models": models,
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
    }


def chat_serving(engine: FakeEngine, tool_flags: bool = True, model_type: str = "gpt_oss") -> OpenAIServingChat:
    flags = {"enable_auto_tools": True, "tool_parser": "openai"} if tool_flags else {}
    return OpenAIServingChat(**_common(engine, model_type), response_role="assistant", **flags)


def responses_serving(engine: FakeEngine) -> OpenAIServingResponses:
    return OpenAIServingResponses(**_common(engine, "gpt_oss"))


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def ask_chat(engine: FakeEngine, tool_flags: bool = True, **fields: Any) -> Any:
    """What vLLM answers a chat request with."""
    fields.setdefault("messages", [{"role": "user", "content": "Hello"}])
    request = ChatCompletionRequest.model_validate({"model": MODEL} | fields)
    return await chat_serving(engine, tool_flags).create_chat_completion(request)


async def ask_responses(engine: FakeEngine, **fields: Any) -> Any:
    """What vLLM answers a request of /v1/responses with."""
    request = ResponsesRequest.model_validate({"model": MODEL, "input": "Hello"} | fields)
    return await responses_serving(engine).create_responses(request)


async def _all_of(answer: Any) -> list[Any]:
    return [part async for part in await answer]


def chat(engine: FakeEngine, tool_flags: bool = True, **fields: Any) -> dict[str, Any]:
    """The answer to a chat request as the client would get it: the response, or the error, as JSON."""
    return asyncio.run(ask_chat(engine, tool_flags, **fields)).model_dump()


def stream_chat(engine: FakeEngine, tool_flags: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed chat; an error chunk is one with the key "error"."""
    lines = asyncio.run(_all_of(ask_chat(engine, tool_flags, stream=True, **fields)))
    assert lines[-1] == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def told(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What the client of a streamed chat has in the end."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "error": None}
    for chunk in chunks:
        if "error" in chunk:
            result["error"] = chunk["error"]["message"]
            continue
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            result["content"] += delta.get("content") or ""
            result["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(result["calls"]):
                    result["calls"].append([call["function"]["name"], ""])
                result["calls"][call["index"]][1] += call["function"].get("arguments") or ""
            result["finish"] = choice.get("finish_reason") or result["finish"]
    return result


def of_chat(answer: dict[str, Any]) -> tuple[str | None, str | None, list[list[str]], str]:
    """(content, reasoning, [[function, arguments]], finish reason) of a whole chat."""
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    return message["content"], message["reasoning_content"], calls, choice["finish_reason"]


def of_response(answer: dict[str, Any]) -> tuple[str | None, str | None, list[list[str]], str]:
    """The same of a response, whose status tells less than a finish reason."""

    def text(kind: str) -> str | None:
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == kind]
        return "\n".join(filter(None, texts)) if texts else None

    calls = [[item["name"], item["arguments"]] for item in answer["output"] if item["type"] == "function_call"]
    finish = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[answer["status"]]
    return text("message"), text("reasoning"), calls, finish


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a choice of one, as /v1/responses spells it."""
    return {"type": "function"} | tool["function"]


def respond(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    """The answer of /v1/responses as JSON."""
    return asyncio.run(ask_responses(engine, **fields)).model_dump()


def stream_responses(engine: FakeEngine, **fields: Any) -> list[Any]:
    """The events of a streamed /v1/responses."""
    return asyncio.run(_all_of(ask_responses(engine, stream=True, **fields)))
