"""`pydantic-ai`: both model classes, whole and streamed, tools, and an answer forced through a tool."""

from __future__ import annotations

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from runner import ANSWER, SUM, WEATHER, Found, equal

KINDS = (OpenAIChatModel, OpenAIResponsesModel)


def agent(kind, url, model, **options):
    provider = OpenAIProvider(base_url=url, api_key="none")
    made = Agent(
        kind(model, provider=provider), model_settings={"temperature": 0, "max_tokens": 200}, retries=0, **options
    )
    called: list[str] = []
    return made, called


def with_tool(kind, url, model, **options):
    made, called = agent(kind, url, model, **options)

    @made.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather"""
        called.append(city)
        return '{"temperature": 21}'

    return made, called


async def case_both_models_answer(url, model):
    for kind in KINDS:
        result = await agent(kind, url, model)[0].run(SUM)
        equal(result.output, ANSWER, kind)


async def case_both_models_stream(url, model):
    for kind in KINDS:
        async with agent(kind, url, model)[0].run_stream(SUM) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
        equal("".join(pieces), ANSWER, (kind, pieces))


async def case_both_models_use_a_tool(url, model):
    for kind in KINDS:
        made, called = with_tool(kind, url, model)
        result = await made.run(WEATHER)
        equal(called, ["Paris"], kind)
        assert "21" in result.output, kind


async def case_both_models_use_a_tool_streamed(url, model):
    for kind in KINDS:
        made, called = with_tool(kind, url, model)
        async with made.run_stream(WEATHER) as result:
            output = await result.get_output()
        equal(called, ["Paris"], kind)
        assert "21" in output, kind


async def case_both_models_give_structured_output(url, model):
    for kind in KINDS:
        result = await agent(kind, url, model, output_type=NativeOutput(Found))[0].run(SUM)
        assert isinstance(result.output, Found), kind


async def case_both_models_answer_through_a_forced_tool(url, model):
    """Its default for structured answers: a tool, and tool_choice required. So small a model would call on and on."""
    for kind in KINDS:
        one = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
        result = await agent(kind, url, model, output_type=Found)[0].run(SUM, model_settings=one)
        assert isinstance(result.output, Found), kind
