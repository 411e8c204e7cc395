"""OpenAI's agents library over Responses and over chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from conftest import Server
from openai import AsyncOpenAI

from clients.asked import Odder, Person, Small, leaves, until_idle
from clients.conftest import KEY
from clients.script import BOTH, HELLO, PERSON, REPORT

over_each = pytest.mark.parametrize("over", ["responses", "chat"])


def _agent(server: Server, over: str, name: str = "agent", tokens: int = 400, **more: Any) -> Any:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if over == "responses" else OpenAIChatCompletionsModel
    settings = ModelSettings(temperature=0, max_tokens=tokens)
    return Agent(
        "helper",
        instructions="Be brief.",
        model=kind(name, client),
        model_settings=settings,
        **more,
    )


@over_each
def test_chat_whole_and_streamed(agent: Server, over: str) -> None:
    async def talk() -> None:
        helper = _agent(agent, over)
        whole = await Runner.run(helper, "hi")
        assert whole.final_output == HELLO
        assert whole.context_wrapper.usage.output_tokens > 0
        streamed = Runner.run_streamed(helper, "hi")
        pieces = [
            e.data.delta
            async for e in streamed.stream_events()
            if e.type == "raw_response_event" and e.data.type == "response.output_text.delta"
        ]
        assert "".join(pieces) == streamed.final_output == HELLO

    asyncio.run(talk())


@over_each
@pytest.mark.parametrize(("question", "report"), [("weather?", REPORT), ("both cities?", BOTH)])
def test_a_tool_and_back(agent: Server, over: str, question: str, report: str) -> None:
    asked_for: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked_for.append(city)
        return "sunny" if question == "weather?" else "mild"

    async def talk() -> None:
        helper = _agent(agent, over, tools=[get_weather])
        cities = ["Paris"] if question == "weather?" else ["Paris", "Rome"]
        assert (await Runner.run(helper, question)).final_output == report
        assert sorted(asked_for) == cities
        asked_for.clear()
        streamed = Runner.run_streamed(helper, question)
        assert [e async for e in streamed.stream_events()]
        assert streamed.final_output == report
        assert sorted(asked_for) == cities

    asyncio.run(talk())


@over_each
def test_structured_output(agent: Server, smol: Server, over: str) -> None:
    async def talk() -> None:
        found = await Runner.run(_agent(agent, over, output_type=Person), "describe it")
        assert found.final_output.model_dump() == PERSON
        streamed = Runner.run_streamed(_agent(agent, over, output_type=Person), "describe it")
        assert [e async for e in streamed.stream_events()]
        assert streamed.final_output.model_dump() == PERSON
        loose = AgentOutputSchema(Odder, strict_json_schema=False)
        odd = await Runner.run(_agent(agent, over, output_type=loose), "describe odder things")
        assert (odd.final_output.size, odd.final_output.name) == (2, None)
        small = _agent(smol, over, "smollm2", 200, output_type=Small)
        assert isinstance((await Runner.run(small, "Make one.")).final_output, Small)

    asyncio.run(talk())


@over_each
def test_a_session_of_several_turns(agent: Server, over: str) -> None:
    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    async def talk() -> None:
        helper, session = _agent(agent, over, tools=[get_weather]), SQLiteSession("one")
        for question, answer in (
            ("ponder", HELLO),
            ("weather?", REPORT),
            ("my name?", "Your name is Ada."),
        ):
            assert (await Runner.run(helper, question, session=session)).final_output == answer

    asyncio.run(talk())


def test_turns_that_the_server_remembers(agent: Server) -> None:
    async def talk() -> None:
        helper = _agent(agent, "responses")
        first = await Runner.run(helper, "ponder")
        second = await Runner.run(helper, "my name?", previous_response_id=first.last_response_id)
        assert second.final_output == "Your name is Ada."

    asyncio.run(talk())


@over_each
def test_a_handoff(agent: Server, over: str) -> None:
    async def talk() -> None:
        other = _agent(agent, over)
        other.name = "other"
        helper = _agent(agent, over, handoffs=[other])
        done = await Runner.run(helper, "hand over")
        assert done.last_agent.name == "other" and done.final_output == HELLO

    asyncio.run(talk())


@over_each
def test_a_client_that_stops_reading_leaves_nothing(agent: Server, over: str) -> None:
    async def leave() -> None:
        helper = _agent(agent, over, tokens=2500)
        streamed = Runner.run_streamed(helper, "talk on")
        async for event in streamed.stream_events():
            if event.type == "raw_response_event":
                break
        streamed.cancel()
        await until_idle(agent)
        await leaves(agent, Runner.run(helper, "talk on"))

    asyncio.run(leave())
