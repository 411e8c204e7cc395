"""LangChain's chat models for OpenAI (chat and Responses), Anthropic and Ollama."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Server
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

from clients.asked import Odd, Odder, Person, Small, get_weather, leaves, until_idle
from clients.conftest import KEY
from clients.script import BOTH, HELLO, PERSON, REPORT

OVER = ["chat", "responses", "anthropic", "ollama"]
over_each = pytest.mark.parametrize("over", OVER)


def _chat(server: Server, over: str, model: str = "agent", tokens: int = 400) -> Any:
    if over == "anthropic":
        how: dict[str, Any] = {"base_url": server.url, "api_key": KEY, "max_retries": 0}
        return ChatAnthropic(model_name=model, temperature=0, max_tokens_to_sample=tokens, **how)
    if over == "ollama":
        headers = {"headers": {"authorization": f"Bearer {KEY}"}}
        how = {"base_url": server.url, "client_kwargs": headers}
        return ChatOllama(model=model, temperature=0, num_predict=tokens, **how)
    return ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key=KEY,
        temperature=0,
        max_completion_tokens=tokens,
        max_retries=0,
        use_responses_api=over == "responses",
        stream_usage=True,
    )


def _folded(chunks: Any) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


@over_each
def test_chat_whole_and_streamed(agent: Server, over: str) -> None:
    chat = _chat(agent, over)
    whole = chat.invoke("hi")
    assert whole.text == HELLO
    assert whole.usage_metadata["input_tokens"] > 0 < whole.usage_metadata["output_tokens"]
    streamed = _folded(chat.stream("hi"))
    assert streamed.text == HELLO
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]


@over_each
def test_several_turns_with_a_system_prompt(agent: Server, over: str) -> None:
    turns = [("system", "Be brief."), ("user", "I am Ada."), ("ai", "Hello."), ("user", "my name?")]
    assert _chat(agent, over).invoke(turns).text == "Your name is Ada."


@over_each
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_back(agent: Server, over: str, stream: bool) -> None:
    armed = _chat(agent, over).bind_tools([get_weather])
    for question, cities, report in [
        ("weather?", ["Paris"], REPORT),
        ("both cities?", ["Paris", "Rome"], BOTH),
    ]:
        said = _folded(armed.stream(question)) if stream else armed.invoke(question)
        assert [(c["name"], c["args"]) for c in said.tool_calls] == [
            ("get_weather", {"city": city}) for city in cities
        ]
        assert len({c["id"] for c in said.tool_calls}) == len(cities)
        result = "sunny" if len(cities) == 1 else "mild"
        results = [ToolMessage(result, tool_call_id=c["id"]) for c in said.tool_calls]
        history = [HumanMessage(question), said, *results]
        answer = _folded(armed.stream(history)) if stream else armed.invoke(history)
        assert answer.text == report


@pytest.mark.parametrize("over", ["chat", "responses", "anthropic"])
def test_a_demanded_tool(agent: Server, over: str) -> None:
    armed = _chat(agent, over).bind_tools([get_weather], tool_choice="get_weather")
    (call,) = armed.invoke("weather?").tool_calls
    assert call["args"] == {"city": "Paris"}


METHODS = [
    *[(over, "json_schema") for over in OVER],
    *[(over, "function_calling") for over in OVER],
    *[(over, "json_mode") for over in ("chat", "responses", "ollama")],
]


@pytest.mark.parametrize(("over", "method"), METHODS)
def test_structured_output(agent: Server, over: str, method: str) -> None:
    chat = _chat(agent, over).with_structured_output(Person, method=method)
    question = "describe by a call of Person" if method == "function_calling" else "describe it"
    found = chat.invoke(question)
    assert found.model_dump() == PERSON
    *_, last = chat.stream(question)
    assert last.model_dump() == PERSON


@over_each
def test_an_odd_schema(agent: Server, smol: Server, over: str) -> None:
    strict = {"strict": False} if over in ("chat", "responses") else {}
    shapes = [(Odd, "describe odd things")]
    if over != "anthropic":
        shapes.append((Odder, "describe odder things"))
    for shape, question in shapes:
        chat = _chat(agent, over).with_structured_output(shape, method="json_schema", **strict)
        found = chat.invoke(question)
        assert (found.size, found.name, found.level) == (2, None, 3)
        assert found.root.children[0].label == "b"
    # Anthropic's SDK makes constants a part of descriptions; as a tool's, they are sent.
    method = "function_calling" if over == "anthropic" else "json_schema"
    real = _chat(smol, over, "smollm2", 200).with_structured_output(Small, method=method)
    assert isinstance(real.invoke("Make one."), Small)


@over_each
def test_a_client_that_stops_reading_leaves_nothing(agent: Server, over: str) -> None:
    chat = _chat(agent, over, tokens=2500)

    async def leave() -> None:
        count = 0
        async for _ in (stream := chat.astream("talk on")):
            count += 1
            if count == 5:
                break
        await stream.aclose()
        await until_idle(agent)
        await leaves(agent, chat.ainvoke("talk on"))

    asyncio.run(leave())


def test_a_hundred_at_once_keep_apart(agent: Server) -> None:
    chats = [_chat(agent, over).bind_tools([get_weather]) for over in OVER]

    async def ask(number: int) -> None:
        question = "weather?" if number % 2 else "both cities?"
        chunks = [c async for c in chats[number % 4 if number % 3 else 0].astream(question)]
        said = _folded(chunks)
        assert [c["args"]["city"] for c in said.tool_calls] == ["Paris", "Rome"][: 2 - number % 2]

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(ask(number))

    asyncio.run(all_of_them())
