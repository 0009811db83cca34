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
from npu_gptoss.serving.openai.engine import Started, encoder_of, start, use
from npu_gptoss.serving.openai.errors import engine_ended, failure, log_failure, of_the_request, refusal
from npu_gptoss.serving.openai.release import release


async def create(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Answers a chat. `self`: vLLM's serving object. Returns an error, an answer or a stream for vLLM's route."""
    if not intake.is_ours(self) or request.use_beam_search:
        return await original(self, request, raw_request)
    if (unknown := await self._check_model(intake.written(request, raw_request))) is not None:
        return unknown
    body = intake.body_of(raw_request)
    plain = None if body is None else request
    try:
        wanted = chat.read(body or request.model_dump(exclude_unset=True), release().defaults(self))
        intake.warn(raw_request, wanted.asked.warnings)
        name = f"chatcmpl-{self._base_request_id(raw_request, request.request_id)}"
        started = await start(self, wanted.asked, name, raw_request, plain, stream=wanted.stream)
        answer = chat.Answer(wanted, await _facts(started, wanted), started.turn)
    except of_the_request() as error:
        return refusal(error)
    if wanted.stream:
        return answer.stream(started.outputs, started.step, functools.partial(_last_lines, answer, raw_request))
    try:
        found = await answer.whole(started.outputs, started.step)
    except engine_ended() as error:  # vLLM answers it with 500
        return failure(error)
    use(raw_request, found["usage"])
    return answer_object(release().ChatCompletionResponse, found, raw_request)


async def create_batch(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Answers a request with several conversations: one choice for each."""
    if not intake.is_ours(self):
        return await original(self, request, raw_request)
    if (unknown := await self._check_model(request)) is not None:
        return unknown
    body = request.model_dump(exclude_unset=True)
    base = f"chatcmpl-{self._base_request_id(raw_request, request.request_id)}"
    try:
        wanted = [chat.read(body | {"messages": messages}, release().defaults(self)) for messages in body["messages"]]
        started = [
            await start(self, one.asked, f"{base}_{number}", raw_request, stream=False)
            for number, one in enumerate(wanted)
        ]
        answers = [chat.Answer(one, await _facts(run, one), run.turn) for one, run in zip(wanted, started, strict=True)]
    except of_the_request() as error:
        return refusal(error)
    try:
        found = await asyncio.gather(*(a.whole(run.outputs, run.step) for a, run in zip(answers, started, strict=True)))
    except engine_ended() as error:
        return failure(error)
    whole = {**found[0], "id": base, "choices": [c for one in found for c in one["choices"]]}
    whole["choices"] = [choice | {"index": index} for index, choice in enumerate(whole["choices"])]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    whole["usage"] = found[0]["usage"] | {name: sum(one["usage"][name] for one in found) for name in names}
    use(raw_request, whole["usage"])
    return answer_object(release().ChatCompletionResponse, whole, raw_request)


async def tokenize(serving: Any, body: Mapping[str, Any]) -> Any:
    """Returns the JSON of /tokenize for a chat, or vLLM's ErrorResponse. serving: vLLM's object for chats."""
    if (unknown := await serving._check_model(intake.Written(body))) is not None:
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
    return base.model_validate(body) if raw_request is None else answer_class(base).of(body)


@functools.cache
def answer_class(base: type) -> type:
    """Returns a subclass of vLLM's answer that prints the front end's JSON."""

    class Answered(base):
        @classmethod
        def of(cls, body: Mapping[str, Any]) -> Any:
            made = cls.model_construct(**{name: body[name] for name in ("id", "status") if name in body})
            made.__dict__["json"] = dict(body)
            return made

        def model_dump(self, **_: Any) -> dict[str, Any]:
            own = {"status": self.status} if "status" in self.__dict__["json"] else {}
            return self.__dict__["json"] | own

    return Answered


def _last_lines(answer: chat.Answer, raw_request: Any, error: Exception | None) -> Iterator[str]:
    if error is None:
        use(raw_request, answer.usage())
    else:
        log_failure("a streamed chat failed", error)
        yield f"data: {json.dumps(failure(error).model_dump())}\n\n"
    yield "data: [DONE]\n\n"


async def _facts(started: Started, wanted: chat.Request) -> chat.Facts:
    self, plain = started.serving, started.plain
    tokenizer = await release().tokenizer(self) if plain.logprobs else None
    prompt = {"prompt_token_ids": started.prompt} if wanted.with_token_ids else {}
    if getattr(plain, "return_prompt_text", False):
        prompt["prompt_text"] = encoder_of(self).decode(started.prompt)

    def logprobs(piece: Piece, which: Sequence[int]) -> dict[str, Any]:
        return self._create_chat_logprobs(
            token_ids=[piece.token_ids[number] for number in which],
            top_logprobs=[piece.logprobs[number] for number in which],
            tokenizer=tokenizer,
            num_output_top_logprobs=plain.top_logprobs,
            return_as_token_id=plain.return_tokens_as_token_ids,
            **({"logprob_token_ids": ids} if (ids := getattr(plain, "logprob_token_ids", None)) else {}),
        ).model_dump()

    return chat.Facts(
        id=started.name,
        model=started.model,
        prompt_tokens=len(started.prompt),
        role=self.response_role,
        fingerprint=getattr(self, "system_fingerprint", None),
        cached_details=self.enable_prompt_tokens_details,
        prompt=prompt,
        logprobs=logprobs if plain.logprobs else None,
        log=output_logger(self, started.name, wanted.stream),
    )


def output_logger(self: Any, name: str, streamed: bool) -> Callable[..., None] | None:
    """Returns a function that logs an answer's text (`--enable-log-outputs`); None if the option is off."""
    if not (self.enable_log_outputs and self.request_logger):
        return None
    deltas = getattr(self, "enable_log_deltas", True)

    def log(text: str, tokens: Sequence[int] | None, finish: str | None) -> None:
        is_delta = tokens is not None
        if is_delta and not (deltas and text):
            return
        self.request_logger.log_outputs(
            request_id=name,
            outputs=text,
            output_token_ids=list(tokens) if is_delta else None,
            finish_reason=finish if is_delta or not streamed else "streaming_complete",
            is_streaming=streamed,
            delta=is_delta,
        )

    return log
