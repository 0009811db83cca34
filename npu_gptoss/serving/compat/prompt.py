"""From the client's messages to the prompt, as the harmony guide and the published chat template have it.

vLLM 0.11.0 renders a system message as a second `system` turn and an empty developer turn in every chat, loses the name
of the function whose result it renders, leaves the channel out of earlier answers, drops earlier reasoning, and tells
the model that there is no commentary channel although it has tools. On /v1/responses it drops `instructions` unless
there are tools, and does not find the call that belongs to a `function_call_output`. The model was trained on none of
these prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseFunctionToolCall
from openai_harmony import Author, DeveloperContent, Message, Role
from pydantic import BaseModel

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, replace
from npu_gptoss.serving.compat.reading import TOOL_PREFIX, text_of

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

# type of a content part -> its field that holds the text
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text") | {"refusal": "refusal"}


def as_text(content: Any) -> str:
    """The text of a message's content: a string, None, or a list of parts. gpt-oss reads nothing but text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        fields = part.model_dump() if isinstance(part, BaseModel) else part
        kind = fields.get("type", "text")
        if kind not in TEXT_PARTS:
            raise ValueError(f"gpt-oss reads text only, a message holds a part of type {kind!r}. Leave it out.")
        texts.append(fields.get(TEXT_PARTS[kind]) or "")
    return "".join(texts)


def developer(instructions: str) -> Message:
    content = DeveloperContent.new()
    return Message.from_role_and_content(
        Role.DEVELOPER, content.with_instructions(instructions) if instructions else content
    )


def assistant(text: str, channel: str) -> Message:
    return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def tool_call(name: str, arguments: str) -> Message:
    return assistant(arguments, "commentary").with_recipient(TOOL_PREFIX + name).with_content_type("json")


def tool_result(name: str, output: str) -> Message:
    author = Author.new(Role.TOOL, TOOL_PREFIX + name)
    return Message.from_author_and_content(author, output).with_channel("commentary").with_recipient("assistant")


def join_developer_turns(messages: Iterable[Message]) -> list[Message]:
    """One developer turn where several would follow each other, with all instructions and tools; none that is empty."""
    joined: list[Message] = []
    for message in messages:
        if message.author.role is not Role.DEVELOPER:
            joined.append(message)
            continue
        instructions, tools = [], {}
        parts = list(message.content)
        if joined and joined[-1].author.role is Role.DEVELOPER:
            parts = [*joined.pop().content, *parts]
        for part in parts:
            if isinstance(part, DeveloperContent):
                instructions.append(part.instructions)
                tools |= part.tools or {}
            else:
                instructions.append(getattr(part, "text", ""))
        text = "\n\n".join(filter(None, instructions))
        if text or tools:
            joined.append(
                Message.from_role_and_content(
                    Role.DEVELOPER, DeveloperContent(instructions=text or None, tools=tools or None)
                )
            )
    return joined


def chat_message(message: Any, functions: dict[str, str]) -> list[Message]:
    """The harmony messages of one message of a chat.

    `functions` maps the id of each tool call so far to its function's name; an assistant message adds to it. Raises
    ValueError, which vLLM answers with 400, for what cannot be rendered.
    """
    if isinstance(message, Message):
        return [message]
    fields: Mapping[str, Any] = message.model_dump(exclude_none=True) if isinstance(message, BaseModel) else message
    role, content = fields.get("role"), fields.get("content")
    if role in ("system", "developer"):
        return [developer(as_text(content))]
    if role == "user":
        return [Message.from_role_and_content(Role.USER, as_text(content))]
    if role == "assistant":
        return _assistant_messages(fields, functions)
    if role == "tool":
        call_id = fields.get("tool_call_id")
        name = functions.get(call_id, fields.get("name"))
        if not name:
            raise ValueError(
                f"a tool message answers the tool_call_id {call_id!r}, but no assistant message before it makes that "
                "call. Send the assistant's message with its tool_calls too."
            )
        return [tool_result(name, as_text(content))]
    raise ValueError(f"a message has the role {role!r}; expected system, developer, user, assistant or tool.")


def _assistant_messages(fields: Mapping[str, Any], functions: dict[str, str]) -> list[Message]:
    messages = []
    reasoning = as_text(fields.get("reasoning_content") or fields.get("reasoning"))
    if reasoning:
        messages.append(assistant(reasoning, "analysis"))  # harmony leaves it out again once an answer has followed
    calls = list(fields.get("tool_calls") or ())
    content = fields.get("content")
    text = as_text(content)
    if text or (content is not None and not calls):
        messages.append(assistant(text, "commentary" if calls else "final"))
    for call in calls:
        function = call.get("function") or {}
        name = function.get("name", "")
        functions[call.get("id")] = name
        messages.append(tool_call(name, function.get("arguments") or ""))
    return messages


def install_chat(serving_chat: ModuleType) -> None:
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
    expect_parameters(serving_chat.get_system_message, "reasoning_effort", "instructions", "with_custom_tools")

    def _make_request_with_harmony(
        self, request: ChatCompletionRequest
    ) -> tuple[list[Message], list[list[int]], list[dict]]:
        hide_tools = request.tool_choice == "none" and self.exclude_tools_when_tool_choice_none
        tools = None if hide_tools else request.tools
        functions: dict[str, str] = {}
        chat = join_developer_turns(part for message in request.messages for part in chat_message(message, functions))
        instructions = None
        if envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS and chat and chat[0].author.role is Role.DEVELOPER:
            instructions = chat.pop(0).content[0].instructions
        messages = join_developer_turns(
            [
                serving_chat.get_system_message(
                    reasoning_effort=request.reasoning_effort,
                    instructions=instructions,
                    with_custom_tools=bool(tools),
                ),
                serving_chat.get_developer_message(tools=tools),
                *chat,
            ]
        )
        prompt_token_ids = serving_chat.render_for_completion(messages)
        engine_prompt = serving_chat.EngineTokensPrompt(prompt_token_ids=prompt_token_ids)
        if request.cache_salt is not None:
            engine_prompt["cache_salt"] = request.cache_salt
        return messages, [prompt_token_ids], [engine_prompt]

    replace(serving, "_make_request_with_harmony", _make_request_with_harmony)


def response_item(item: Any, earlier: list[Any]) -> Message:
    """The harmony message of one input item of /v1/responses; `earlier` holds the function calls before it."""
    fields: Mapping[str, Any] = item.model_dump() if isinstance(item, BaseModel) else item
    kind = fields.get("type", "message")
    if kind == "message":
        role, text = fields.get("role"), as_text(fields.get("content"))
        if role in ("system", "developer"):
            return developer(text)
        if role == "assistant":
            return assistant(text, "final")
        return Message.from_role_and_content(Role(role), text)
    if kind == "reasoning":
        return assistant(as_text(fields.get("content")), "analysis")
    if kind == "function_call":
        if not isinstance(item, ResponseFunctionToolCall):
            earlier.append(ResponseFunctionToolCall.model_construct(**fields))  # vLLM adds only objects by itself
        return tool_call(fields["name"], fields["arguments"])
    if kind == "function_call_output":
        call_id = fields["call_id"]
        for call in reversed(earlier):
            if isinstance(call, ResponseFunctionToolCall) and call.call_id == call_id:
                return tool_result(call.name, as_text(fields["output"]))
        raise ValueError(f"No call message found for {call_id}: send the function_call item before its output.")
    raise ValueError(f"Unknown input type: {kind}")


def install_responses(serving_responses: ModuleType) -> None:
    from vllm import envs

    serving = serving_responses.OpenAIServingResponses
    original = serving._construct_input_messages_with_harmony
    expect_parameters(original, "self", "request", "prev_response")
    expect_source(
        original,
        "if with_custom_tools: dev_msg = get_developer_message(instructions=request.instructions, tools=request.tools)",
        "messages.append(parse_response_input(response_msg, prev_outputs))",
    )
    expect_parameters(serving_responses.parse_response_input, "response_msg", "prev_responses")

    def parse_response_input(response_msg: Any, prev_responses: list[Any]) -> Message:
        return response_item(response_msg, prev_responses)

    def _construct_input_messages_with_harmony(
        self, request: ResponsesRequest, prev_response: Any | None
    ) -> list[Message]:
        in_system_turn = envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        if prev_response is not None or not request.instructions or in_system_turn:
            messages = original(self, request, prev_response)
        else:
            messages = original(self, request.model_copy(update={"instructions": None}), None)
            messages.insert(1, developer(request.instructions))
        return join_developer_turns(_without_empty_reasoning(messages))

    replace(serving_responses, "parse_response_input", parse_response_input)
    replace(serving, "_construct_input_messages_with_harmony", _construct_input_messages_with_harmony)


def _without_empty_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Clients send reasoning items back that hold only an id or a summary."""
    return [message for message in messages if message.channel != "analysis" or text_of(message)]
