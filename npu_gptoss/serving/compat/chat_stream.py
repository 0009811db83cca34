"""The chunks of a streamed chat, from the same reading of the turn that the whole answer has (`turn`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.compat.patch import Mismatch, around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.streaming import log_failure
from npu_gptoss.serving.compat.targets import CHAT, CHAT_SERVING, ENGINE_PROTOCOL, PROTOCOL
from npu_gptoss.serving.compat.turn import Event, Turn, assistant_turn, reading_of

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

OLD, NEW = "reasoning_content", "reasoning"  # of a message's reasoning: 0.11.0 has the one, 0.23 the other


@functools.cache  # asked for every piece of a stream
def names_of(kind: type) -> tuple[str, str]:
    """That of vLLM's own field of such messages, and the one that clients look for besides."""
    own, other = (OLD, NEW) if OLD in kind.model_fields else (NEW, OLD)
    if other in kind.model_fields:
        raise Mismatch(f"{kind.__name__} has the field {other} already")
    return own, other


def with_both_names(message: Any) -> Any:
    """A ChatMessage or DeltaMessage of vLLM's with both.

    Set as an extra field, which the class allows: its constructor would log a warning for each.
    """
    own, other = names_of(type(message))
    if own in message.model_fields_set:
        setattr(message, other, getattr(message, own))
    return message


@repair("reasoning-name", f"{CHAT}:ChatMessage", lines=("0.11",), upstream="vllm PR 27752")
def install_reasoning_name(serving_chat: ModuleType) -> None:
    """Clients look for message.reasoning, as OpenAI's own test does; 0.11.0 has reasoning_content alone."""
    _have_both_names(serving_chat)


@repair("reasoning-name", f"{CHAT_SERVING}:ChatMessage", lines=("0.23",))
def install_reasoning_name_0_23(serving: ModuleType) -> None:
    """Clients of vLLM look for message.reasoning_content, as they have for years; 0.23 has reasoning alone."""
    _have_both_names(serving)


def _have_both_names(serving_chat: ModuleType) -> None:
    original = serving_chat.ChatMessage
    expect_parameters(original, names_of(original)[0])
    expect_source(serving_chat.OpenAIServingChat.chat_completion_full_generator, "message = ChatMessage(")

    def ChatMessage(**fields: Any) -> Any:
        return with_both_names(original(**fields))

    replace(serving_chat, "ChatMessage", ChatMessage)


class Choice:
    """One of the `n` answers: its turn, and what the client has of it."""

    def __init__(self, turn: Turn, with_reasoning: bool, protocol: ModuleType) -> None:
        self.turn = turn
        self.tokens = 0
        self.finished = False
        self._with_reasoning = with_reasoning
        self._protocol = protocol  # vLLM's, with the classes of a chunk
        self._told: dict[Kind, int] = {}  # kind -> its last part that has text

    def delta(self, output: CompletionOutput) -> Any:
        """What an output adds to the message, a DeltaMessage; without a field when it adds nothing."""
        self.tokens += len(output.token_ids)
        events = [event for token in output.token_ids for event in self.turn.feed(token)]
        if output.finish_reason is not None:
            events += self.turn.end(output.finish_reason)
            self.finished = True
        return self._message(events)

    def _message(self, events: list[Event]) -> Any:
        from vllm.entrypoints.chat_utils import make_tool_call_id

        made = self._protocol
        texts: dict[Kind, str] = {}
        calls: list[Any] = []
        for event in events:
            part = event.part
            if part.kind is Kind.CALL:
                index = next(i for i, call in enumerate(self.turn.calls) if call is part)
                if event.what == "begun":
                    opened = {"id": make_tool_call_id(), "type": "function", "index": index}
                    function = made.DeltaFunctionCall(name=part.name, arguments="")
                    calls.append(made.DeltaToolCall(function=function, **opened))
                elif event.what == "more" and calls and calls[-1].index == index:
                    calls[-1].function.arguments += event.text  # one entry: some clients read the first alone
                elif event.what == "more":
                    function = made.DeltaFunctionCall(arguments=event.text)
                    calls.append(made.DeltaToolCall(index=index, function=function))
            elif event.what == "more" and (part.kind is Kind.ANSWER or self._with_reasoning):
                new_line = "\n" if self._told.get(part.kind, part.number) != part.number else ""
                texts[part.kind] = texts.get(part.kind, "") + new_line + event.text
                self._told[part.kind] = part.number
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if Kind.ANSWER in texts:
            fields["content"] = texts[Kind.ANSWER]
        if Kind.REASONING in texts:
            fields[names_of(made.DeltaMessage)[0]] = texts[Kind.REASONING]
        return with_both_names(made.DeltaMessage(**fields))

    def finish_reason(self, output: CompletionOutput) -> str:
        return "tool_calls" if self.turn.called else output.finish_reason


GENERATING = (
    *("self", "request", "result_generator", "request_id", "model_name", "conversation", "tokenizer"),
    "request_metadata",
)


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
    expect_parameters(original, *GENERATING, "enable_force_include_usage")
    expect_source(
        original,
        "role = self.get_chat_request_role(request)",
        "request_metadata.final_usage_info = UsageInfo(",
        "data = self.create_streaming_error_response(str(e))",
    )
    expect_parameters(serving._create_chat_logprobs, "token_ids", "top_logprobs", "tokenizer")

    @around(serving, "chat_completion_stream_generator")
    def chat_completion_stream_generator(
        original: Callable[..., AsyncIterator[str]], self: Any, *turn: Any, enable_force_include_usage: bool
    ) -> AsyncIterator[str]:
        if not self.use_harmony:
            return original(self, *turn, enable_force_include_usage)
        options = turn[0].stream_options
        with_usage = bool(enable_force_include_usage or (options and options.include_usage))
        running_usage = bool(with_usage and options and options.continuous_usage_stats)
        return streamed(self, serving_chat, PROTOCOL, (with_usage, running_usage), *turn)


@repair("chat-stream-channels", f"{CHAT_SERVING}:OpenAIServingChat.__init__", lines=("0.23",))
def install_chat_channels_0_23(serving: ModuleType) -> None:
    """A streamed chat runs several messages of one kind together, gives forced calls and stop strings as content, and
    ends a call that max_tokens cut off with "tool_calls", so that a client runs it."""
    from npu_gptoss.serving.lines.vllm_0_23 import vllms_own

    owner = serving.OpenAIServingChat
    original = vllms_own(owner, "chat_completion_stream_generator")
    expect_parameters(original, *GENERATING)
    expect_source(
        original,
        "role = self.get_chat_request_role(request)",
        "request_metadata.final_usage_info = UsageInfo(",
        "self._raise_if_error(output.finish_reason, request_id)",
        "choice_data = maybe_filter_parallel_tool_calls(choice_data, request)",
    )
    expect_parameters(owner._create_chat_logprobs, "token_ids", "top_logprobs", "tokenizer")

    # the object's own, for vllm-ascend puts another generator into the class, before this or after it
    @around(owner, "__init__")
    def __init__(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony:
            self.chat_completion_stream_generator = generator(self)

    def generator(self: Any) -> Callable[..., AsyncIterator[str]]:
        def chat_completion_stream_generator(request: Any, *given: Any, **_: Any) -> Any:
            usage = serving.should_include_usage(request.stream_options, self.enable_force_include_usage)
            # what follows is of the reading of other models
            return streamed(self, serving, ENGINE_PROTOCOL, usage, request, *given[: len(GENERATING) - 2])

        return chat_completion_stream_generator


async def streamed(
    self: Any,
    serving_chat: ModuleType,
    protocol: str,
    usage_wanted: tuple[bool, bool],
    request: Any,
    result_generator: AsyncIterator[RequestOutput],
    request_id: str,
    model_name: str,
    conversation: list,
    tokenizer: Any,
    request_metadata: Any,
) -> AsyncIterator[str]:
    """The lines of a streamed chat.

    `self`: vLLM's serving object, `serving_chat` its module. usage_wanted: at the end, and in every chunk.
    """
    module = importlib.import_module(protocol)
    choices = [
        Choice(assistant_turn(reading_of(request)), request.include_reasoning, module) for _ in range(request.n or 1)
    ]
    made = int(time.time())
    with_usage, running_usage = usage_wanted
    fingerprint = getattr(self, "system_fingerprint", None)
    with_one_call = getattr(serving_chat, "maybe_filter_parallel_tool_calls", lambda choice, request: choice)
    raise_if_error = getattr(self, "_raise_if_error", lambda finish_reason, request_id: None)
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
        raise_if_error(output.finish_reason, request_id)
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
        last = choice.finished and not with_usage and fingerprint is not None
        signed = {"system_fingerprint": fingerprint} if last else {}
        return line([with_one_call(shown, request)], **usage_so_far(choice.tokens), **signed)

    try:
        async with contextlib.aclosing(result_generator) as results:  # a client that goes away ends the generation
            async for result in results:
                if first is None:
                    first = result
                    role = self.get_chat_request_role(request)
                    prompt = {"prompt_token_ids": result.prompt_token_ids if request.return_token_ids else None}
                    if getattr(request, "return_prompt_text", False):
                        prompt["prompt_text"] = result.prompt
                    for i in range(len(choices)):
                        # null, as OpenAI opens a call: to pydantic-ai 1 an empty text is the whole answer
                        opening = serving_chat.ChatCompletionResponseStreamChoice(
                            index=i,
                            delta=serving_chat.DeltaMessage(role=role, content=None),
                            logprobs=None,
                            finish_reason=None,
                        )
                        yield line([opening], **prompt, **usage_so_far(0))
                for output in result.outputs:
                    told = step(output)
                    if told is not None:
                        yield told
        whole = usage(sum(choice.tokens for choice in choices))
        if with_usage:
            if self.enable_prompt_tokens_details and first is not None and first.num_cached_tokens:
                whole.prompt_tokens_details = serving_chat.PromptTokenUsageInfo(cached_tokens=first.num_cached_tokens)
            signed = {"system_fingerprint": fingerprint} if fingerprint is not None else {}
            yield line([], exclude_none=True, usage=whole, **signed)
        request_metadata.final_usage_info = whole
        for choice in choices:
            said = choice.turn.texts(Kind.ANSWER) or "".join(call.text for call in choice.turn.calls)
            log(said, None, "streaming_complete", delta=False)
    except Exception as error:
        log_failure("a streamed chat failed", error)
        yield f"data: {_told(self, error)}\n\n"
    yield "data: [DONE]\n\n"


def _told(self: Any, error: Exception) -> str:
    of_generating = getattr(self, "_convert_generation_error_to_streaming_response", None)
    if of_generating is None:
        return self.create_streaming_error_response(str(error))
    return of_generating(error) if hasattr(error, "status_code") else self.create_streaming_error_response(error)
