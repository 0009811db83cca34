"""Replaces vLLM's handler of chat completions: takes its request and returns its classes of answers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from npu_gptoss.frontend import chat
from npu_gptoss.frontend.engine import Piece
from npu_gptoss.serving.openai import intake
from npu_gptoss.serving.openai.engine import Started, encoder_of, facts_of, start, use
from npu_gptoss.serving.openai.errors import (
    failed,
    failure,
    log_failure,
    of_the_request,
    printing,
    refusal,
    unknown_model,
)
from npu_gptoss.serving.openai.release import release
from npu_gptoss.serving.releases import vllm as names


async def create(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Answers a chat. `self`: vLLM's serving object. Returns an error, an answer or a stream for vLLM's route."""
    if not intake.is_ours(self) or request.use_beam_search:
        return await original(self, request, raw_request)
    if (unknown := await unknown_model(self, intake.written(request, raw_request))) is not None:
        return unknown
    body = intake.body_of(raw_request)
    plain = None if body is None else request
    name = f"chatcmpl-{self._base_request_id(raw_request, request.request_id)}"
    try:
        started, answer = await _begin(self, body or intake.fields_of(request), name, raw_request, plain)
    except of_the_request() as error:
        return refusal(error)
    if answer.request.stream:
        return answer.stream(started.outputs, started.step, functools.partial(_last_lines, answer, raw_request))
    try:
        found = await answer.whole(started.outputs, started.step)
    except Exception as error:  # vLLM 0.11 answers each with 500, and `vllm run-batch` ends with all its answers
        return failed("a chat failed", error)
    use(raw_request, answer.counts)
    return answer_object(names.ChatCompletionResponse, found, raw_request)


async def _begin(
    self: Any, body: Mapping[str, Any], name: str, raw_request: Any, plain: Any = None
) -> tuple[Started, chat.Answer]:
    """Reads a chat and gives it to the engine. Raises an exception of `of_the_request` if it cannot be served."""
    wanted = chat.read(body, release().defaults(self))
    intake.warn(raw_request, wanted.asked.warnings)
    started = await start(self, wanted.asked, name, raw_request, plain, stream=wanted.stream)
    return started, chat.Answer(wanted, _facts(started, wanted), started.turn)


async def create_batch(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Answers a request with several conversations: one choice for each."""
    if not intake.is_ours(self):
        return await original(self, request, raw_request)
    if (unknown := await unknown_model(self, request)) is not None:
        return unknown
    body = intake.fields_of(request) | {"stream": False}
    base = f"chatcmpl-{self._base_request_id(raw_request, request.request_id)}"
    try:
        begun = [
            await _begin(self, body | {"messages": messages}, f"{base}_{number}", raw_request)
            for number, messages in enumerate(body["messages"])
        ]
    except of_the_request() as error:
        return refusal(error)
    try:
        found = await asyncio.gather(*(answer.whole(started.outputs, started.step) for started, answer in begun))
    except Exception as error:
        return failed("a batch of chats failed", error)
    whole = {**found[0], "id": base, "choices": [c for one in found for c in one["choices"]]}
    whole["choices"] = [choice | {"index": index} for index, choice in enumerate(whole["choices"])]
    counts = {name: sum(answer.counts[name] for _, answer in begun) for name in begun[0][1].counts}
    whole["usage"] = found[0]["usage"] | counts
    use(raw_request, counts)
    return answer_object(names.ChatCompletionResponse, whole, raw_request)


async def tokenize(serving: Any, body: Mapping[str, Any]) -> Any:
    """Returns the JSON of /tokenize for a chat, or vLLM's ErrorResponse. serving: vLLM's object for chats."""
    if (unknown := await unknown_model(serving, intake.Written(body))) is not None:
        return unknown
    try:
        asked = chat.read({name: body[name] for name in body if name in chat.READ}, release().defaults(serving)).asked
        tokens = await asyncio.to_thread(asked.prompt, encoder_of(serving))
    except of_the_request() as error:
        return refusal(error)
    strings = None
    if body.get("return_token_strs"):
        strings = (await release().tokenizer(serving)).convert_ids_to_tokens(tokens)
    limit = release().max_model_len(serving)
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}


def answer_object(base: type, body: Mapping[str, Any], raw_request: Any) -> Any:
    """Wraps `body` as vLLM's answer; without a raw request (`vllm run-batch`) vLLM's class validates it."""
    return base.model_validate(body) if raw_request is None else printing(base).of(body, id=body["id"])


def _last_lines(answer: chat.Answer, raw_request: Any, error: Exception | None) -> Iterator[str]:
    if error is None:
        use(raw_request, answer.counts)
    else:
        log_failure("a streamed chat failed", error)
        yield f"data: {json.dumps(failure(error).model_dump())}\n\n"
    yield "data: [DONE]\n\n"


def _facts(started: Started, wanted: chat.Request) -> chat.Facts:
    self, plain = started.serving, started.plain
    prompt = {"prompt_token_ids": started.prompt} if wanted.with_token_ids else {}
    if getattr(plain, "return_prompt_text", False):
        prompt["prompt_text"] = encoder_of(self).decode(started.prompt)

    def logprobs(piece: Piece, which: Sequence[int]) -> dict[str, Any]:
        return {"content": started.logprobs(piece, which)}

    return facts_of(
        chat.Facts,
        started,
        role=self.response_role,
        fingerprint=getattr(self, "system_fingerprint", None),
        prompt=prompt,
        logprobs=logprobs if plain.logprobs else None,
    )
