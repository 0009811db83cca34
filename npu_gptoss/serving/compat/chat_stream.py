"""The chunks of a streamed chat, from the same reading of the turn that the whole answer has (`turn`)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.compat.patch import Mismatch, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.streaming import log_failure
from npu_gptoss.serving.compat.targets import CHAT
from npu_gptoss.serving.compat.turn import Event, Turn, assistant_turn, reading_of

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage, DeltaMessage
    from vllm.outputs import CompletionOutput, RequestOutput


def with_both_names(message: ChatMessage | DeltaMessage) -> ChatMessage | DeltaMessage:
    """`reasoning`, as OpenAI's clients and later releases of vLLM call it, beside `reasoning_content`.

    Set as an extra field, which the class allows: its constructor would log a warning for each.
    """
    if "reasoning_content" in message.model_fields_set:
        message.reasoning = message.reasoning_content
    return message


@repair("reasoning-name", f"{CHAT}:ChatMessage", lines=("0.11",), upstream="vllm PR 27752")
def install_reasoning_name(serving_chat: ModuleType) -> None:
    """Clients look for message.reasoning, as OpenAI's own test does; 0.11.0 has reasoning_content alone."""
    original = serving_chat.ChatMessage
    expect_parameters(original, "reasoning_content")
    if "reasoning" in original.model_fields:
        raise Mismatch("ChatMessage has the field reasoning already")
    expect_source(serving_chat.OpenAIServingChat.chat_completion_full_generator, "message = ChatMessage(")

    def ChatMessage(**fields: Any) -> Any:
        return with_both_names(original(**fields))

    replace(serving_chat, "ChatMessage", ChatMessage)


class Choice:
    """One of the `n` answers: its turn, and what the client has of it."""

    def __init__(self, turn: Turn, with_reasoning: bool) -> None:
        self.turn = turn
        self.tokens = 0
        self.finished = False
        self._with_reasoning = with_reasoning
        self._told: dict[Kind, int] = {}  # kind -> its last part that has text

    def delta(self, output: CompletionOutput) -> DeltaMessage:
        """What an output adds to the message; without a field when it adds nothing."""
        self.tokens += len(output.token_ids)
        events = [event for token in output.token_ids for event in self.turn.feed(token)]
        if output.finish_reason is not None:
            events += self.turn.end(output.finish_reason)
            self.finished = True
        return self._message(events)

    def _message(self, events: list[Event]) -> DeltaMessage:
        from vllm.entrypoints.chat_utils import make_tool_call_id
        from vllm.entrypoints.openai.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

        texts: dict[Kind, str] = {}
        calls: list[DeltaToolCall] = []
        for event in events:
            part = event.part
            if part.kind is Kind.CALL:
                index = next(i for i, call in enumerate(self.turn.calls) if call is part)
                if event.what == "begun":
                    function = DeltaFunctionCall(name=part.name, arguments="")
                    calls.append(DeltaToolCall(id=make_tool_call_id(), type="function", index=index, function=function))
                elif event.what == "more" and calls and calls[-1].index == index:
                    calls[-1].function.arguments += event.text  # one entry: some clients read the first alone
                elif event.what == "more":
                    calls.append(DeltaToolCall(index=index, function=DeltaFunctionCall(arguments=event.text)))
            elif event.what == "more" and (part.kind is Kind.ANSWER or self._with_reasoning):
                new_line = "\n" if self._told.get(part.kind, part.number) != part.number else ""
                texts[part.kind] = texts.get(part.kind, "") + new_line + event.text
                self._told[part.kind] = part.number
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if Kind.ANSWER in texts:
            fields["content"] = texts[Kind.ANSWER]
        if Kind.REASONING in texts:
            fields["reasoning_content"] = texts[Kind.REASONING]
        return with_both_names(DeltaMessage(**fields))

    def finish_reason(self, output: CompletionOutput) -> str:
        return "tool_calls" if self.turn.called else output.finish_reason


@repair(
    "chat-stream-channels",
    f"{CHAT}:OpenAIServingChat.chat_completion_stream_generator",
    lines=("0.11",),
    upstream="vllm issues 24837 and 37937, PR 45547 (open)",
)
def install_chat_channels(serving_chat: ModuleType) -> None:
    """A streamed chat is read by other rules than a whole one: it drops preambles and calls on the analysis
    channel, gives forced calls and stop strings as content, and breaks when max_tokens cuts a call off."""
    serving = serving_chat.OpenAIServingChat
    original = serving.chat_completion_stream_generator
    expect_parameters(
        original,
        *("self", "request", "result_generator", "request_id", "model_name", "conversation", "tokenizer"),
        *("request_metadata", "enable_force_include_usage"),
    )
    expect_source(
        original,
        "role = self.get_chat_request_role(request)",
        "request_metadata.final_usage_info = UsageInfo(",
        "data = self.create_streaming_error_response(str(e))",
    )
    expect_parameters(serving._create_chat_logprobs, "token_ids", "top_logprobs", "tokenizer")

    @functools.wraps(original)
    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        conversation: list,
        tokenizer: Any,
        request_metadata: Any,
        enable_force_include_usage: bool,
    ) -> AsyncIterator[str]:
        if not self.use_harmony:
            arguments = (request, result_generator, request_id, model_name, conversation, tokenizer, request_metadata)
            async for line in original(self, *arguments, enable_force_include_usage):
                yield line
            return
        choices = [
            Choice(assistant_turn(reading_of(request)), request.include_reasoning) for _ in range(request.n or 1)
        ]
        made = int(time.time())
        options = request.stream_options
        with_usage = bool(enable_force_include_usage or (options and options.include_usage))
        running_usage = bool(with_usage and options and options.continuous_usage_stats)
        first: RequestOutput | None = None

        def usage(completion_tokens: int) -> Any:
            prompt = len(first.prompt_token_ids or ()) if first is not None else 0
            return serving_chat.UsageInfo(
                prompt_tokens=prompt, completion_tokens=completion_tokens, total_tokens=prompt + completion_tokens
            )

        def line(choices: list[Any], exclude_none: bool = False, **fields: Any) -> str:
            chunk = serving_chat.ChatCompletionStreamResponse(
                id=request_id,
                object="chat.completion.chunk",
                created=made,
                model=model_name,
                choices=choices,
                **fields,
            )
            return f"data: {chunk.model_dump_json(exclude_unset=True, exclude_none=exclude_none)}\n\n"

        def usage_so_far(tokens: int) -> dict[str, Any]:
            return {"usage": usage(tokens)} if running_usage else {}

        def log(outputs: str, token_ids: list[int] | None, finish_reason: str | None, delta: bool) -> None:
            if self.enable_log_outputs and self.request_logger:
                self.request_logger.log_outputs(
                    request_id=request_id,
                    outputs=outputs,
                    output_token_ids=token_ids,
                    finish_reason=finish_reason,
                    is_streaming=True,
                    delta=delta,
                )

        def step(output: CompletionOutput) -> str | None:
            """The chunk of an output, None when it has nothing to tell."""
            choice = choices[output.index]
            if choice.finished:
                return None
            delta = choice.delta(output)
            every_token = request.return_token_ids or (request.logprobs and request.top_logprobs is not None)
            tokens_are_told = every_token and output.token_ids
            if not (delta.model_fields_set or tokens_are_told or choice.finished):
                return None
            fields: dict[str, Any] = {"logprobs": None, "finish_reason": None, "token_ids": None}
            if request.logprobs and request.top_logprobs is not None:
                fields["logprobs"] = self._create_chat_logprobs(
                    token_ids=output.token_ids,
                    top_logprobs=output.logprobs,
                    tokenizer=tokenizer,
                    num_output_top_logprobs=request.top_logprobs,
                    return_as_token_id=request.return_tokens_as_token_ids,
                )
            if request.return_token_ids:
                fields["token_ids"] = list(output.token_ids)
            if choice.finished:
                fields |= {"finish_reason": choice.finish_reason(output), "stop_reason": output.stop_reason}
            said = delta.content or "".join(call.function.arguments for call in delta.tool_calls)
            log(said, list(output.token_ids), output.finish_reason, delta=True)
            shown = serving_chat.ChatCompletionResponseStreamChoice(index=output.index, delta=delta, **fields)
            return line([shown], **usage_so_far(choice.tokens))

        try:
            async with contextlib.aclosing(result_generator) as results:  # a client that goes away ends the generation
                async for result in results:
                    if first is None:
                        first = result
                        role = self.get_chat_request_role(request)
                        for i in range(len(choices)):
                            # null, as OpenAI opens a call: to pydantic-ai 1 an empty text is the whole answer
                            opening = serving_chat.ChatCompletionResponseStreamChoice(
                                index=i,
                                delta=serving_chat.DeltaMessage(role=role, content=None),
                                logprobs=None,
                                finish_reason=None,
                            )
                            ids = result.prompt_token_ids if request.return_token_ids else None
                            yield line([opening], prompt_token_ids=ids, **usage_so_far(0))
                    for output in result.outputs:
                        told = step(output)
                        if told is not None:
                            yield told
            whole = usage(sum(choice.tokens for choice in choices))
            if with_usage:
                if self.enable_prompt_tokens_details and first is not None and first.num_cached_tokens:
                    whole.prompt_tokens_details = serving_chat.PromptTokenUsageInfo(
                        cached_tokens=first.num_cached_tokens
                    )
                yield line([], exclude_none=True, usage=whole)
            request_metadata.final_usage_info = whole
            for choice in choices:
                said = choice.turn.texts(Kind.ANSWER) or "".join(call.text for call in choice.turn.calls)
                log(said, None, "streaming_complete", delta=False)
        except Exception as error:
            log_failure("a streamed chat failed", error)
            yield f"data: {self.create_streaming_error_response(str(error))}\n\n"
        yield "data: [DONE]\n\n"

    replace(serving, "chat_completion_stream_generator", chat_completion_stream_generator)
