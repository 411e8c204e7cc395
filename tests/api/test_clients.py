"""Libraries that people put before an OpenAI server, against ours: text, streams, tools, a key.

Each test is skipped where its library is not installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from conftest import Server
from scripted import Rule

KEY = "sk-test"
RULES = [
    Rule("sunny", "It is sunny in Paris."),
    Rule("weather", scripted.call("get_weather", city="Paris")),
    Rule("", "Hello there."),
]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = scripted.make(tmp_path_factory.mktemp("clients") / "agent", default_model, RULES)
    running = Server(
        str(folder), "--name", "agent", "--trust-remote-code", "--api-key", KEY
    ).wait_ready()
    yield running
    running.stop()


def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return "sunny"


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_litellm(agent: Server) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": "openai/agent",
        "api_base": f"{agent.url}/v1",
        "api_key": KEY,
        "temperature": 0,
        "max_tokens": 40,
    }
    hello = [{"role": "user", "content": "hi"}]
    whole = litellm.completion(messages=hello, **asked)
    assert whole.choices[0].message.content == "Hello there."
    assert whole.usage.completion_tokens > 0
    pieces = litellm.completion(messages=hello, stream=True, **asked)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == "Hello there."
    weather = [{"role": "user", "content": "weather?"}]
    called = litellm.completion(messages=weather, tools=[TOOL], **asked).choices[0]
    assert called.finish_reason == "tool_calls"
    call = called.message.tool_calls[0]
    assert call.function.name == "get_weather"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reported = litellm.completion(
        messages=[*weather, called.message, *results], tools=[TOOL], **asked
    )
    assert reported.choices[0].message.content == "It is sunny in Paris."
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=hello, **asked | {"api_key": "sk-wrong"})


def test_langchain(agent: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="agent",
        base_url=f"{agent.url}/v1",
        api_key=KEY,
        temperature=0,
        max_completion_tokens=40,
    )
    assert chat.invoke("hi").content == "Hello there."
    assert "".join(str(p.content) for p in chat.stream("hi")) == "Hello there."
    armed = chat.bind_tools([get_weather])
    answer = armed.invoke("weather?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": get_weather(**call["args"])}
    reported = armed.invoke([{"role": "user", "content": "weather?"}, answer, result])
    assert reported.content == "It is sunny in Paris."


def test_pydantic_ai(agent: Server) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{agent.url}/v1", api_key=KEY)
    model = OpenAIChatModel("agent", provider=provider)
    helper = Agent(model, tools=[get_weather], model_settings={"temperature": 0, "max_tokens": 40})

    async def talk() -> tuple[str, str, str]:
        hello = await helper.run("hi")
        weather = await helper.run("weather?")
        async with helper.run_stream("hi") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        return hello.output, weather.output, "".join(pieces)

    assert asyncio.run(talk()) == ("Hello there.", "It is sunny in Paris.", "Hello there.")
