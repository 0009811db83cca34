"""`openai-agents` (Python): both model classes, whole and streamed, with a tool and with a structured answer."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from runner import ANSWER, SUM, WEATHER, Found, equal

set_tracing_disabled(True)
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


def agent(kind, url, model, **options) -> tuple[Agent, list[str]]:
    """The agent, and the cities that its tool was called with."""
    called: list[str] = []

    @function_tool(strict_mode=False)
    def get_weather(city: str) -> str:
        """Get the weather"""
        called.append(city)
        return '{"temperature": 21}'

    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    settings = {"model_settings": SETTINGS, **options}
    tools = [get_weather] if settings.pop("tools", False) else []
    return Agent(name="test", model=kind(model=model, openai_client=client), tools=tools, **settings), called


async def case_both_models_answer(url, model):
    for kind in KINDS:
        result = await Runner.run(agent(kind, url, model)[0], SUM)
        equal(result.final_output, ANSWER, (kind, result.final_output))


async def case_both_models_stream(url, model):
    for kind in KINDS:
        result = Runner.run_streamed(agent(kind, url, model)[0], SUM)
        data = [getattr(event, "data", None) async for event in result.stream_events()]
        equal(result.final_output, ANSWER, (kind, result.final_output))
        deltas = [one.delta for one in data if getattr(one, "type", "") == "response.output_text.delta"]
        equal("".join(deltas), ANSWER, (kind, deltas))


async def case_both_models_use_a_tool(url, model):
    for kind in KINDS:
        one, called = agent(kind, url, model, tools=True)
        result = await Runner.run(one, WEATHER, max_turns=4)
        equal(called, ["Paris"], kind)
        assert "21" in result.final_output, kind


async def case_both_models_use_a_tool_streamed(url, model):
    for kind in KINDS:
        one, called = agent(kind, url, model, tools=True)
        result = Runner.run_streamed(one, WEATHER, max_turns=4)
        async for _ in result.stream_events():
            pass
        equal(called, ["Paris"], kind)
        assert "21" in result.final_output, kind


async def case_both_models_obey_a_forced_tool(url, model):
    forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
    for kind in KINDS:
        one, called = agent(kind, url, model, tools=True, model_settings=forced)
        await Runner.run(one, WEATHER, max_turns=4)
        equal(called[:1], ["Paris"], kind)


async def case_both_models_give_structured_output(url, model):
    for kind in KINDS:
        result = await Runner.run(agent(kind, url, model, output_type=Found)[0], SUM)
        assert isinstance(result.final_output, Found), kind
