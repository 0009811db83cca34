"""Every request field and every option of `vllm serve` that a release's handlers read has a decision.

A new field or option fails here. The field then goes into a table of the front end, the option into a table below: used
by our handlers (test_engine.py tests it), a reason to leave requests to vLLM's handler, or without effect.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

pytest.importorskip("vllm")

from npu_gptoss.frontend import chat, messages, responses
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.serving.openai.release import A_CHAT, Release_0_33
from npu_gptoss.serving.releases import here
from tests.frontend.test_turn import GRAMMAR_HEADERS
from tests.serving.conftest import found

pytestmark = pytest.mark.serving

OPENAI, LATER = "vllm.entrypoints.openai", here().name != "0.11"
CHAT, RESPONSES = f"{OPENAI}.chat_completion", f"{OPENAI}.responses"
ANTHROPIC = "vllm.entrypoints.anthropic"
# API -> its request class in 0.11, or in later releases
REQUESTS = {
    "chat": found("ChatCompletionRequest", f"{CHAT}.protocol", f"{OPENAI}.protocol"),
    "batch": found("BatchChatCompletionRequest", f"{CHAT}.protocol"),
    "responses": found("ResponsesRequest", f"{RESPONSES}.protocol", f"{OPENAI}.protocol"),
    "messages": found("AnthropicMessagesRequest", f"{ANTHROPIC}.protocol"),
    "count": found("AnthropicCountTokensRequest", f"{ANTHROPIC}.protocol"),
}
# handlers, whose constructors take options of `vllm serve`
HANDLERS = (
    found("OpenAIServingChat", f"{CHAT}.serving", f"{OPENAI}.serving_chat"),
    found("OpenAIServingResponses", f"{RESPONSES}.serving", f"{OPENAI}.serving_responses"),
    found("AnthropicServingMessages", f"{ANTHROPIC}.serving"),
    found("OnlineRenderer", "vllm.renderers.online_renderer"),
    found("OpenAIServingRender", "vllm.entrypoints.serve.render.serving"),
)

TABLES = {
    "chat": (chat.READ, chat.PASSED, chat.WITHOUT_EFFECT, chat.REFUSED, {chat.BEAM_SEARCH}),
    "responses": (
        *(responses.READ, responses.PASSED, responses.STORED, responses.WITHOUT_EFFECT),
        *(responses.LEFT_OUT, responses.REFUSED),
    ),
    "messages": (*(messages.READ, messages.PASSED, messages.WITHOUT_EFFECT, messages.LEFT_OUT), messages.REFUSED),
}
TABLES |= {"batch": TABLES["chat"], "count": TABLES["messages"]}

# vLLM's own objects, handed from one to the other
PLUMBING = {
    *("engine_client", "model_config", "models", "model_registry", "online_renderer", "openai_serving_render"),
    *("renderer", "request_logger"),
}
USED = {
    *("response_role", "return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_force_include_usage"),
    *("enable_log_outputs", "enable_log_deltas", "enable_per_request_metrics", "default_chat_template_kwargs"),
    *("reasoning_effort_map", "disabled_thinking_effort"),
    "tool_strict_level",  # vLLM frames a structure by it (Release_0_33.hold)
    "log_error_stack",  # in vLLM's own error responses
}
FALLS_THROUGH = {"tool_server"}
WITHOUT_EFFECT = {
    # the front end reads harmony and its calls always, and hides tools that tool_choice does not want
    *("reasoning_parser", "tool_parser", "enable_auto_tools", "exclude_tools_when_tool_choice_none"),
    # gpt-oss has one format of text; vLLM, too, ignores a template there
    *("chat_template", "chat_template_content_format", "trust_request_chat_template", "trust_request_mm_kwargs"),
}


def test_field_of_a_request_is_in_no_table_or_in_two() -> None:
    assert all(REQUESTS.values()) or not LATER
    for api, request in ((api, request) for api, request in REQUESTS.items() if request is not None):
        places = {field: sum(field in table for table in TABLES[api]) for field in request.model_fields}
        wrong = [field for field, count in places.items() if count != 1]
        assert wrong == [], f"{api}: decide: used, falls through, or refused"


def test_option_of_the_server_has_no_decision() -> None:
    handlers = [handler for handler in HANDLERS if handler is not None]
    assert len(handlers) == (4 if LATER else 2)
    for handler in handlers:
        _, *options = inspect.signature(handler.__init__).parameters
        tables = (PLUMBING, USED, FALLS_THROUGH, WITHOUT_EFFECT)
        wrong = [option for option in options if sum(option in table for table in tables) != 1]
        assert wrong == [], f"{handler.__name__}: decide: used, falls through, or refused"


def test_header_of_a_grammar_is_not_read() -> None:
    harmony = pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")
    written = {harmony._FINAL_BEGIN.format(constrain=constrain) for constrain in (*harmony._JSON_CONSTRAINS, "")}
    written |= {
        begin.format(name="get_weather", channel=channel, constrain=constrain)
        for begin in harmony._FUNCTION_CALL_BEGINS
        for channel in harmony._TOOL_CALL_CHANNELS
        for constrain in harmony._JSON_CONSTRAINS
    }
    assert written <= {header for headers in GRAMMAR_HEADERS.values() for header in headers}


def test_field_is_in_two_tables_of_an_api() -> None:
    for api, tables in TABLES.items():
        names = [name for table in tables for name in table]
        assert len(names) == len(set(names)), api


def test_field_item_or_tool_of_a_vendors_library_is_unknown() -> None:
    """The libraries of the release's lock, which are newer than vLLM's own classes."""
    from openai.types.responses import ResponseInputItemParam, ToolParam
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    assert set(ResponseCreateParamsBase.__annotations__) <= set().union(*TABLES["responses"])
    offered = [("input", ResponseInputItemParam, responses.read), ("tools", ToolParam, responses.read)]
    if LATER:
        from anthropic.types.beta import BetaToolUnionParam

        offered.append(("tools", BetaToolUnionParam, messages.read))
    refused = []
    for field, union, read in offered:
        for kind in {kind for each in get_args(union) for kind in _kinds(each)}:
            body = {"input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
            # beside a function, as agents send it
            beside = [{"name": "f", "input_schema": {}}] if read is messages.read else []
            try:
                read(body | {field: [{"type": kind, "name": "x"}, *beside]})
            except ConversationError as error:
                refused += [kind] if error.param == f"{field}[0].type" else []
    assert refused == []


def _kinds(item: type) -> tuple[str, ...]:
    """Returns the values of its field `type`; none if it may lack one."""
    hint = get_type_hints(item).get("type")
    return get_args(hint) if get_origin(hint) is Literal else ()


def test_limit_of_the_generation_config_is_lost_in_a_chat() -> None:
    """--override-generation-config '{"max_new_tokens": 7}'; a request's own limit may be lower."""
    pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")
    config = SimpleNamespace(max_model_len=100)
    asked = SimpleNamespace(model_config=config, default_sampling_params={"max_tokens": 7}, override_max_tokens=7)
    for fields, want in (({}, 7), ({"max_tokens": 9}, 7), ({"max_completion_tokens": 5, "max_tokens": 9}, 5)):
        request = REQUESTS["chat"].model_validate(A_CHAT | fields)
        assert Release_0_33().sampling(asked, request, 10).max_tokens == want


def test_servers_map_of_efforts_is_lost() -> None:
    """--reasoning-effort-map '{"max": "low"}': without it, max is high."""
    pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")
    renderer = SimpleNamespace(reasoning_effort_map={"max": "low"})
    assert Release_0_33().defaults(SimpleNamespace(online_renderer=renderer)).efforts == {"max": "low"}
