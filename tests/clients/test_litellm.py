"""litellm, over the four protocols that it can speak to us."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from conftest import Server

from clients import asked
from clients.asked import TOOL, Odder, Person, get_weather
from clients.conftest import KEY
from clients.script import BOTH, HELLO, PERSON, REPORT

OVER = ["openai", "anthropic", "ollama_chat"]


def _how(agent: Server, over: str, **more: Any) -> dict[str, Any]:
    base = agent.url if over in ("anthropic", "ollama_chat") else f"{agent.url}/v1"
    settings = {"api_base": base, "api_key": KEY, "temperature": 0, "max_tokens": 400}
    return {"model": f"{over}/agent"} | settings | more


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def _folded(chunks: Any, messages: list[Any]) -> Any:
    return litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0]


@pytest.mark.parametrize("over", OVER)
def test_chat_whole_and_streamed(agent: Server, over: str) -> None:
    how = _how(agent, over)
    whole = litellm.completion(messages=_user("hi"), **how)
    assert whole.choices[0].message.content == HELLO
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens > 0 and whole.usage.completion_tokens > 0
    streamed = _folded(litellm.completion(messages=_user("hi"), stream=True, **how), _user("hi"))
    assert (streamed.message.content, streamed.finish_reason) == (HELLO, "stop")


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_back(agent: Server, over: str, stream: bool) -> None:
    how = _how(agent, over, tools=[TOOL], stream=stream)

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(messages=messages, **how)
        return _folded(answer, messages) if stream else answer.choices[0]

    rounds = [("weather?", ["Paris"], REPORT), ("both cities?", ["Paris", "Rome"], BOTH)]
    ollama = over == "ollama_chat" and stream
    # litellm makes one of several calls that Ollama's chunks number, and misses that they were calls.
    for question, cities, report in rounds[:1] if ollama else rounds:
        called = ask(_user(question))
        assert called.finish_reason == ("stop" if ollama else "tool_calls")
        calls = called.message.tool_calls
        assert [json.loads(c.function.arguments)["city"] for c in calls] == cities
        assert len({c.id for c in calls}) == len(cities)
        results = [
            {
                "role": "tool",
                "tool_call_id": c.id,
                "content": "sunny" if len(cities) == 1 else "mild",
            }
            for c in calls
        ]
        said = called.message.model_dump(exclude_none=True)
        reported = ask([*_user(question), said, *results])
        assert reported.message.content == report


@pytest.mark.parametrize("over", OVER)
def test_structured_output(agent: Server, over: str) -> None:
    how = _how(agent, over)
    # litellm sends Anthropic's endpoint a tool whose schema has lost its definitions.
    odd = [] if over == "anthropic" else [(Odder, "describe odder things")]
    for shape, question in [(Person, "describe"), *odd]:
        messages = _user(question)
        answer = litellm.completion(messages=messages, response_format=shape, **how)
        found = shape.model_validate_json(answer.choices[0].message.content)
        if isinstance(found, Person):
            assert found.model_dump() == PERSON
        stream = litellm.completion(messages=messages, response_format=shape, stream=True, **how)
        text = _folded(stream, messages).message.content
        assert shape.model_validate_json(text) == found


def test_thoughts_come_apart(agent: Server) -> None:
    answer = litellm.completion(messages=_user("ponder"), **_how(agent, "openai"))
    assert answer.choices[0].message.reasoning_content.strip() == "Well, well."
    assert answer.choices[0].message.content == HELLO


def test_responses(agent: Server) -> None:
    how = _how(agent, "openai")
    limits = {"max_output_tokens": how.pop("max_tokens")}
    first = litellm.responses(input="hi", **how, **limits)
    assert first.output[-1].content[0].text == HELLO
    events = list(litellm.responses(input="hi", stream=True, **how, **limits))
    assert events[-1].type == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == HELLO
    flat = {"type": "function", **TOOL["function"]}
    called = litellm.responses(input="weather?", tools=[flat], **how, **limits)
    (call,) = [item for item in called.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": get_weather(**json.loads(call.arguments)),
    }
    reported = litellm.responses(
        input=[result], previous_response_id=called.id, tools=[flat], **how, **limits
    )
    assert reported.output[-1].content[0].text == REPORT
    shaped = litellm.responses(input="describe", text_format=Person, **how, **limits)
    assert Person.model_validate_json(shaped.output[-1].content[0].text).model_dump() == PERSON


def test_a_prompt_without_a_chat(agent: Server) -> None:
    how = _how(agent, "text-completion-openai", max_tokens=5)
    assert litellm.text_completion(prompt="hi", **how).choices[0].text


@pytest.mark.parametrize("over", OVER)
def test_a_wrong_key_is_told(agent: Server, over: str) -> None:
    # litellm has no words of its own for what Ollama's endpoint refuses.
    told = litellm.APIConnectionError if over == "ollama_chat" else litellm.AuthenticationError
    with pytest.raises(told, match="API key"):
        litellm.completion(messages=_user("hi"), **_how(agent, over, api_key="sk-wrong"))


@pytest.mark.parametrize("over", ["openai", "anthropic", "ollama_chat"])
def test_a_client_that_stops_reading_leaves_nothing(agent: Server, over: str) -> None:
    async def leave() -> None:
        how = _how(agent, over, max_tokens=2500)
        stream = await litellm.acompletion(messages=_user("talk on"), stream=True, **how)
        count = 0
        async for _ in stream:
            count += 1
            if count == 5:
                break
        await stream.aclose()
        asking = asyncio.create_task(litellm.acompletion(messages=_user("talk on"), **how))
        await asyncio.sleep(0.5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asked.until_idle(agent)

    asyncio.run(leave())
