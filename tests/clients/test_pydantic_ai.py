"""pydantic-ai over OpenAI's chat and Responses and over Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Server
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ThinkingPart, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from clients.asked import Odder, Person, Small, leaves, until_idle
from clients.conftest import KEY
from clients.script import BOTH, HELLO, PERSON, REPORT, THOUGHT

over_each = pytest.mark.parametrize("over", ["chat", "responses", "anthropic"])


def _agent(server: Server, over: str, name: str = "agent", tokens: int = 400, **more: Any) -> Any:
    if over == "anthropic":
        model: Any = AnthropicModel(
            name, provider=AnthropicProvider(base_url=server.url, api_key=KEY)
        )
    else:
        kind = OpenAIChatModel if over == "chat" else OpenAIResponsesModel
        model = kind(name, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=KEY))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": tokens}, **more)


@over_each
def test_chat_whole_and_streamed(agent: Server, over: str) -> None:
    helper = _agent(agent, over, instructions="Be brief.")

    async def talk() -> None:
        whole = await helper.run("hi")
        assert whole.output == HELLO
        assert whole.usage.input_tokens > 0 < whole.usage.output_tokens
        async with helper.run_stream("hi") as stream:
            assert "".join([p async for p in stream.stream_text(delta=True)]) == HELLO
        again = await helper.run("my name?", message_history=whole.all_messages())
        assert again.output == "Your name is Ada."

    asyncio.run(talk())


@over_each
def test_thoughts_come_apart_and_go_back(agent: Server, over: str) -> None:
    async def talk() -> None:
        helper = _agent(agent, over)
        settings = {"openai_reasoning_summary": "auto"} if over == "responses" else {}
        found = await helper.run("ponder", model_settings=settings)
        assert found.output == HELLO
        parts = [p for m in found.all_messages() for p in m.parts if isinstance(p, ThinkingPart)]
        assert [p.content.strip() for p in parts] == [THOUGHT]
        again = await helper.run("my name?", message_history=found.all_messages())
        assert again.output == "Your name is Ada."

    asyncio.run(talk())


@over_each
@pytest.mark.parametrize(("question", "report"), [("weather?", REPORT), ("both cities?", BOTH)])
def test_a_tool_and_back(agent: Server, over: str, question: str, report: str) -> None:
    asked_for: list[str] = []

    def get_weather(city: str) -> str:
        asked_for.append(city)
        return "sunny" if question == "weather?" else "mild"

    async def talk() -> None:
        helper = _agent(agent, over, tools=[get_weather])
        cities = ["Paris"] if question == "weather?" else ["Paris", "Rome"]
        assert (await helper.run(question)).output == report
        assert sorted(asked_for) == cities
        asked_for.clear()
        async with helper.run_stream(question) as stream:
            assert await stream.get_output() == report
        assert sorted(asked_for) == cities

    asyncio.run(talk())


@over_each
def test_structured_output(agent: Server, over: str) -> None:
    ways = [
        (ToolOutput(Person), "describe by a result"),
        (PromptedOutput(Person), "describe it"),
        (NativeOutput(Person), "describe it"),
    ]
    # Which of Anthropic's models have native output, pydantic-ai knows by their names.
    ways = ways[:2] if over == "anthropic" else ways

    async def talk() -> None:
        for way, question in ways:
            helper = _agent(agent, over, output_type=way)
            assert (await helper.run(question)).output.model_dump() == PERSON
            async with helper.run_stream(question) as stream:
                *_, last = [p async for p in stream.stream_output()]
            assert last.model_dump() == PERSON

    asyncio.run(talk())


@over_each
def test_an_odd_schema(agent: Server, smol: Server, over: str) -> None:
    async def talk() -> None:
        if over != "anthropic":
            helper = _agent(agent, over, output_type=NativeOutput(Odder, strict=False))
            found = (await helper.run("describe odder things")).output
            assert (found.size, found.name, found.level) == (2, None, 3)
        for way in (ToolOutput,) if over == "anthropic" else (NativeOutput, ToolOutput):
            real = _agent(smol, over, "smollm2", 200, output_type=way(Small), retries=0)
            assert isinstance((await real.run("Make one.")).output, Small)

    asyncio.run(talk())


@over_each
def test_a_client_that_stops_reading_leaves_nothing(agent: Server, over: str) -> None:
    async def leave() -> None:
        helper = _agent(agent, over, tokens=2500)
        async with helper.run_stream("talk on") as stream:
            async for _ in stream.stream_text(delta=True):
                break
        await until_idle(agent)
        await leaves(agent, helper.run("talk on"))

    asyncio.run(leave())
