"""The server's prompts come from `npu_gptoss.harmony`, as the engine's do; long ones are encoded in a thread.

The model was trained on none of the prompts that vLLM 0.11.0 writes, and openai-harmony's tokenizer, quadratic in runs
of one character, runs in its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseFunctionToolCall
from openai_harmony import Message

from npu_gptoss.harmony.conversation import (
    ConversationError,
    conversation,
    developer_message,
    join_developer_turns,
    reasoning_effort,
    response_item,
    with_preambles,
)
from npu_gptoss.harmony.encoding import Encoder, check_length, text_tokenizer
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat import vocabulary
from npu_gptoss.serving.compat.patch import Mismatch, around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import CHAT, CONTEXT, HARMONY, PROTOCOL, RESPONSES, TOKENIZATION
from npu_gptoss.serving.compat.tools import allowed_tools

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ErrorResponse, ResponsesRequest

CHARACTERS_IN_THE_LOOP = 20_000  # about 10 ms; longer texts are encoded in a thread
BUILT_IN_TOOLS = ("web_search_preview", "code_interpreter", "container", "mcp")  # the system turn has them, or nobody


@dataclass
class _Prepared:
    """A request's prompt that was made before vLLM asks for it."""

    request: Any
    messages: list[Message]
    token_ids: list[int] | None


_prepared: ContextVar[_Prepared | None] = ContextVar("npu_gptoss_prompt", default=None)


def encoder() -> Encoder:
    """For the served checkpoint."""
    from vllm.entrypoints import harmony_utils

    directory = vocabulary.served_directory()
    return Encoder(harmony_utils.get_encoding(), None if directory is None else text_tokenizer(directory))


async def _encode(messages: Sequence[Message], limit: int | None, for_completion: bool = True) -> list[int]:
    here = encoder()
    if here.characters(messages) <= CHARACTERS_IN_THE_LOOP:
        return here.encode(messages, limit, for_completion)
    return await asyncio.to_thread(here.encode, messages, limit, for_completion)


async def _prepare(serving: Any, request: Any, messages: list[Message], max_tokens: int | None) -> None:
    """Encode the prompt for vLLM to find. Raises ContextError when the model's context cannot hold it."""
    token_ids = await _encode(messages, serving.max_model_len)
    check_length(serving.max_model_len, len(token_ids), max_tokens)
    _prepared.set(_Prepared(request, messages, token_ids))


def _refusal(serving: Any, error: Exception) -> ErrorResponse:
    response = serving.create_error_response(str(error))
    response.error.param = getattr(error, "param", None) or response.error.param
    return response


def _prepared_messages(request: Any) -> list[Message] | None:
    prepared = _prepared.get()
    if prepared is None or prepared.request.request_id != request.request_id:  # by id: it may be a copy
        return None
    return prepared.messages


@repair(
    "harmony-rendering",
    f"{HARMONY} {CHAT} {RESPONSES}:get_system_message",
    f"{HARMONY} {CHAT} {RESPONSES}:get_developer_message",
    f"{HARMONY} {CHAT} {RESPONSES} {CONTEXT}:render_for_completion",
    lines=("0.11",),
    upstream="openai/harmony issue 79 (open)",
)
def install_rendering(harmony_utils: ModuleType) -> None:
    """vLLM tells the model that there is no commentary channel, keeps reasoning that an answer has followed, and
    encodes with openai-harmony's tokenizer, which takes the square of the length of a run of one character."""
    expect_parameters(harmony_utils.get_system_message, "reasoning_effort", "with_custom_tools")
    expect_source(harmony_utils.get_system_message, "if not with_custom_tools:", 'invalid_channel = "commentary"')
    expect_parameters(harmony_utils.get_developer_message, "instructions", "tools")
    expect_source(harmony_utils.render_for_completion, "get_encoding().render_conversation_for_completion(")

    copies = (CHAT, RESPONSES, CONTEXT)

    @around(harmony_utils, "get_system_message", copies)
    def get_system_message(original: Callable[..., Message], *args: Any, **kwargs: Any) -> Message:
        kwargs["with_custom_tools"] = True  # the commentary channel is there without tools too, for preambles
        return original(*args, **kwargs)

    def get_developer_message(instructions: str | None = None, tools: Sequence[Any] | None = None) -> Message:
        from vllm import envs

        functions = [tool for tool in tools or () if tool.type not in BUILT_IN_TOOLS]
        return developer_message(None if envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS else instructions, functions)

    def render_for_completion(messages: list[Message]) -> list[int]:
        prepared = _prepared.get()
        if prepared is not None and prepared.messages is messages and prepared.token_ids is not None:
            token_ids, prepared.token_ids = prepared.token_ids, None  # vLLM adds the output to this list, later
            return token_ids
        return encoder().encode(messages)

    for function in (get_developer_message, render_for_completion):
        replace(harmony_utils, function.__name__, function, copies)


@repair(
    "chat-prompt",
    f"{CHAT}:OpenAIServingChat._make_request_with_harmony .create_chat_completion",
    lines=("0.11",),
    upstream="vllm PRs 28729 and 44330",
)
def install_chat(serving_chat: ModuleType) -> None:
    """vLLM renders a system message as a second system turn beside an empty developer turn, loses the name of a
    tool result's function, and leaves out the channel of earlier answers: no prompts that the model knows."""
    from vllm import envs

    serving = serving_chat.OpenAIServingChat
    expect_parameters(serving._make_request_with_harmony, "self", "request")
    expect_source(
        serving._make_request_with_harmony,
        "dev_msg = get_developer_message(tools=request.tools)",
        "messages.extend(parse_chat_input(chat_msg))",
        'engine_prompt["cache_salt"] = request.cache_salt',
        "return messages, [prompt_token_ids], [engine_prompt]",
    )
    expect_parameters(serving.create_chat_completion, "self", "request", "raw_request")
    expect_source(serving.create_chat_completion, ") = self._make_request_with_harmony(request)")

    def chat_messages(self, request: ChatCompletionRequest) -> list[Message]:
        hide_tools = request.tool_choice == "none" and self.exclude_tools_when_tool_choice_none
        return conversation(
            request.messages,
            tools=() if hide_tools else request.tools or (),
            effort=request.reasoning_effort,
            instructions_in_system=envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS,
        )

    def _make_request_with_harmony(
        self, request: ChatCompletionRequest
    ) -> tuple[list[Message], list[list[int]], list[dict]]:
        messages = _prepared_messages(request) or chat_messages(self, request)
        prompt_token_ids = serving_chat.render_for_completion(messages)
        engine_prompt = serving_chat.EngineTokensPrompt(prompt_token_ids=prompt_token_ids)
        if request.cache_salt is not None:
            engine_prompt["cache_salt"] = request.cache_salt
        return messages, [prompt_token_ids], [engine_prompt]

    replace(serving, "_make_request_with_harmony", _make_request_with_harmony)

    @around(serving, "create_chat_completion")
    async def create_chat_completion(
        original: Callable[..., Any], self: Any, request: ChatCompletionRequest, raw_request: Any = None
    ) -> Any:
        if self.use_harmony and await self._check_model(request) is None:
            try:
                messages = chat_messages(self, request)
                await _prepare(self, request, messages, request.max_completion_tokens or request.max_tokens)
            except (ValueError, TypeError) as error:
                return _refusal(self, error)
        return await original(self, request, raw_request)


@repair(
    "responses-prompt",
    f"{RESPONSES}:parse_response_input OpenAIServingResponses._construct_input_messages_with_harmony",
    f"{RESPONSES}:OpenAIServingResponses.create_responses",
    lines=("0.11",),
    upstream="vllm PR 44330",
)
def install_responses(serving_responses: ModuleType) -> None:
    """vLLM drops the instructions of /v1/responses unless there are tools, and refuses the output of a function
    call that the client sends back."""
    from vllm import envs

    serving = serving_responses.OpenAIServingResponses
    constructing = serving._construct_input_messages_with_harmony
    expect_parameters(constructing, "self", "request", "prev_response")
    expect_source(
        constructing,
        "if with_custom_tools: dev_msg = get_developer_message(instructions=request.instructions, tools=request.tools)",
        "messages.append(parse_response_input(response_msg, prev_outputs))",
    )
    expect_parameters(serving_responses.parse_response_input, "response_msg", "prev_responses")
    expect_parameters(serving.create_responses, "self", "request", "raw_request")
    expect_source(serving.create_responses, "self._make_request_with_harmony(request, prev_response)")
    expect_source(
        serving._make_request_with_harmony,
        "self._construct_input_messages_with_harmony(request, prev_response)",
        "prompt_token_ids = render_for_completion(messages)",
    )

    def parse_response_input(response_msg: Any, prev_responses: list[Any]) -> Message | None:
        """One message; None for a reasoning item without text, which is left out below."""
        names = {call.call_id: call.name for call in prev_responses if isinstance(call, ResponseFunctionToolCall)}
        before = len(names)
        messages = response_item(response_msg, names)
        if len(names) > before and not isinstance(response_msg, ResponseFunctionToolCall):  # vLLM adds only objects
            call_id, name = list(names.items())[-1]
            prev_responses.append(ResponseFunctionToolCall.model_construct(call_id=call_id, name=name))
        return messages[0] if messages else None

    replace(serving_responses, "parse_response_input", parse_response_input)

    @around(serving, "_construct_input_messages_with_harmony")
    def _construct_input_messages_with_harmony(
        original: Callable[..., list[Message]], self: Any, request: ResponsesRequest, prev_response: Any | None
    ) -> list[Message]:
        prepared = _prepared_messages(request)
        if prepared is not None:
            return prepared
        in_system_turn = envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        if prev_response is not None or not request.instructions or in_system_turn:
            messages = original(self, request, prev_response)
        else:
            messages = original(self, request.model_copy(update={"instructions": None}), None)
            messages.insert(1, developer_message(request.instructions))
        return join_developer_turns(with_preambles(message for message in messages if message is not None))

    @around(serving, "create_responses")
    async def create_responses(
        original: Callable[..., Any], self: Any, request: ResponsesRequest, raw_request: Any = None
    ) -> Any:
        previous = self.response_store.get(request.previous_response_id) if request.previous_response_id else None
        is_known = previous is not None or not request.previous_response_id
        if self.use_harmony and is_known and await self._check_model(request) is None:
            try:
                if request.reasoning is not None:
                    effort = reasoning_effort(request.reasoning.effort, "reasoning.effort")
                    request.reasoning = request.reasoning.model_copy(update={"effort": effort})
                shown = request.model_copy(update={"tools": allowed_tools(request)})
                messages = self._construct_input_messages_with_harmony(shown, previous)
                await _prepare(self, request, messages, request.max_output_tokens)
            except (ValueError, TypeError) as error:
                return _refusal(self, error)
        return await original(self, request, raw_request)


@repair("tokenize-prompt", f"{TOKENIZATION}:OpenAIServingTokenization.create_tokenize", lines=("0.11",))
def install_tokenize(serving_tokenization: ModuleType) -> None:
    """/tokenize with messages renders the Jinja template, whose tokens are not those of the chat."""
    serving = serving_tokenization.OpenAIServingTokenization
    own = serving.create_tokenize
    expect_parameters(own, "self", "request", "raw_request")
    expect_source(own, "isinstance(request, TokenizeChatRequest)", "count=len(input_ids)", "token_strs=token_strs")

    @around(serving, "create_tokenize")
    async def create_tokenize(original: Callable[..., Any], self: Any, request: Any, raw_request: Any) -> Any:
        is_chat = isinstance(request, serving_tokenization.TokenizeChatRequest) and not request.chat_template
        if not is_chat or getattr(self.model_config.hf_config, "model_type", None) != MODEL_TYPE:
            return await original(self, request, raw_request)
        refused = await self._check_model(request)
        if refused is not None:
            return refused
        try:
            if request.continue_final_message:
                raise ConversationError(
                    "continue_final_message must be false: harmony ends every message, and gpt-oss begins a new one",
                    "continue_final_message",
                )
            effort = (request.chat_template_kwargs or {}).get("reasoning_effort")
            messages = conversation(request.messages, tools=request.tools or (), effort=effort)
            token_ids = await _encode(messages, None, request.add_generation_prompt)
        except (ValueError, TypeError) as error:
            return _refusal(self, error)
        token_strs = None
        if request.return_token_strs:
            token_strs = (await self.engine_client.get_tokenizer()).convert_ids_to_tokens(token_ids)
        return serving_tokenization.TokenizeResponse(
            tokens=token_ids, token_strs=token_strs, count=len(token_ids), max_model_len=self.max_model_len
        )


class _Fields(dict):
    """The fields of a request; a class, so that `replace` can note what it replaced."""


@repair("effort-words", f"{PROTOCOL}:ChatCompletionRequest.__pydantic_fields__", lines=("0.11",))
def install_effort(protocol: ModuleType) -> None:
    """The reasoning effort `minimal`, which clients of newer models send, is refused by chat and an internal error
    of /v1/responses."""
    from pydantic import BeforeValidator

    chat = protocol.ChatCompletionRequest
    fields = vars(chat)["__pydantic_fields__"]
    field = fields["reasoning_effort"]
    if "minimal" in str(field.annotation):
        raise Mismatch(f"ChatCompletionRequest.reasoning_effort is {field.annotation}; is it repaired already?")

    def effort(word: Any) -> Any:
        return None if word is None else reasoning_effort(word)

    repaired = copy(field)
    repaired.metadata = [*field.metadata, BeforeValidator(effort)]
    replace(chat, "__pydantic_fields__", _Fields(fields | {"reasoning_effort": repaired}))
    chat.model_rebuild(force=True)
