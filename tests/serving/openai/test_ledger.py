"""Every request field and every option of `vllm serve` that a release's handlers read has a decision.

A new field or option fails here. The field then goes into a table of the front end, the option into a table below: used
by our handlers (test_engine.py tests it), a reason to leave requests to vLLM's handler, or without effect.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from npu_gptoss.frontend import chat, messages, responses
from tests.frontend.test_turn import GRAMMAR_HEADERS
from tests.serving.openai.conftest import RELEASES, ROOT, python_of

pytestmark = [pytest.mark.serving, pytest.mark.slow]

TABLES = {
    "chat": (chat.READ, chat.PASSED, chat.WITHOUT_EFFECT, chat.REFUSED, {chat.BEAM_SEARCH}),
    "responses": (
        *(responses.READ, responses.PASSED, responses.STORED, responses.WITHOUT_EFFECT),
        responses.REFUSED,
    ),
    "messages": (
        *(messages.READ, messages.PASSED, messages.WITHOUT_EFFECT, messages.LEFT_OUT),
        messages.REFUSED,
    ),
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


@pytest.fixture(scope="module", params=RELEASES)
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    python, variables = python_of(request.param)
    command = [str(python), "-m", "tests.serving.openai.facts"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_field_of_a_request_is_in_no_table_or_in_two(facts: dict[str, Any]) -> None:
    assert {"chat", "responses"} <= facts["fields"].keys()
    for api, fields in facts["fields"].items():
        places = {field: sum(field in table for table in TABLES[api]) for field in fields}
        wrong = [field for field, count in places.items() if count != 1]
        assert wrong == [], f"{api}: decide: used, falls through, or refused"


def test_option_of_the_server_has_no_decision(facts: dict[str, Any]) -> None:
    assert {"chat", "responses"} <= facts["options"].keys()
    tables = (PLUMBING, USED, FALLS_THROUGH, WITHOUT_EFFECT)
    for handler, options in facts["options"].items():
        wrong = [option for option in options if sum(option in table for table in tables) != 1]
        assert wrong == [], f"{handler}: decide: used, falls through, or refused"


def test_header_of_a_grammar_is_not_read(facts: dict[str, Any]) -> None:
    assert set(facts["headers"]) <= {header for headers in GRAMMAR_HEADERS.values() for header in headers}


def test_field_is_in_two_tables_of_an_api() -> None:
    for api, tables in TABLES.items():
        names = [name for table in tables for name in table]
        assert len(names) == len(set(names)), api
