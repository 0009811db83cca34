"""`langchain-openai`: chat completions and Responses, whole and streamed."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from runner import ANSWER, SUM, WEATHER, Found, equal

APIS = (False, True)  # use_responses_api


@tool
def get_weather(city: str) -> str:
    """Get the weather"""
    return '{"temperature": 21}'


def llm(url, model, responses):
    settings = {"api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 200}
    return ChatOpenAI(model=model, base_url=url, use_responses_api=responses, **settings)


def text(message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.get("text", "") for part in message.content if part.get("type") == "text")


def whole(stream):
    total = None
    for piece in stream:
        total = piece if total is None else total + piece
    return total


def case_both_apis_answer(url, model):
    for responses in APIS:
        equal(text(llm(url, model, responses).invoke(SUM)), ANSWER, responses)


def case_both_apis_stream(url, model):
    for responses in APIS:
        equal(text(whole(llm(url, model, responses).stream(SUM))), ANSWER, responses)


def case_both_apis_run_a_tool(url, model):
    question = HumanMessage(WEATHER)
    for responses in APIS:
        bound = llm(url, model, responses).bind_tools([get_weather])
        asked = bound.invoke([question])
        (call,) = asked.tool_calls
        equal((call["name"], call["args"]), ("get_weather", {"city": "Paris"}), responses)
        result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
        assert "21" in text(bound.invoke([question, asked, result])), responses


def case_both_apis_stream_a_call(url, model):
    for responses in APIS:
        bound = llm(url, model, responses).bind_tools([get_weather])
        total = whole(bound.stream(WEATHER))
        equal([call["args"] for call in total.tool_calls], [{"city": "Paris"}], responses)


def case_both_apis_are_forced_to_call(url, model):
    for responses in APIS:
        for choice in ("any", "get_weather"):
            bound = llm(url, model, responses).bind_tools([get_weather], tool_choice=choice)
            calls = bound.invoke(WEATHER).tool_calls
            equal([call["args"] for call in calls], [{"city": "Paris"}], (responses, choice))


def case_both_apis_give_structured_output(url, model):
    for responses in APIS:
        found = llm(url, model, responses).with_structured_output(Found, method="json_schema").invoke(SUM)
        assert isinstance(found, Found), responses
