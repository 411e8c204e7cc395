"""Tool calls on the real model: demanded ones always parse, validate and stream in pieces.

SmolLM2's template knows no tools, so its prompt is our own rendering and its calls are Hermes'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from conftest import Server

COUNT = 50 if os.environ.get("MILLRACE_HEAVY") else 3
LARGER = os.environ.get("MILLRACE_LARGER_MODEL")
"""A further model to run these tests on, as `millrace serve` takes it."""

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
OTHER = {
    "type": "object",
    "properties": {"to": {"type": "string", "maxLength": 12}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "greet", "parameters": OTHER}},
]
SCHEMAS = {"weather": SCHEMA, "greet": OTHER}


@pytest.fixture(scope="module", params=["smollm2", "larger"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    if request.param == "smollm2":
        yield _client(request.getfixturevalue("server"))
        return
    if not LARGER:
        pytest.skip("no larger model (set MILLRACE_LARGER_MODEL)")
    running = Server(LARGER, "--name", "smollm2").wait_ready(600)
    yield _client(running)
    running.stop()


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _ask(client: openai.OpenAI, seed: int, choice: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": f"How is the weather in city {seed}?"}],
        tools=TOOLS,
        tool_choice=choice,
        temperature=1.0,
        seed=seed,
        **{"max_tokens": 120} | more,
    )


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_demanded_call_parses_validates_and_streams(client: openai.OpenAI, choice: Any) -> None:
    def one(seed: int) -> None:
        whole = _ask(client, seed, choice, parallel_tool_calls=False).choices[0]
        names: list[str] = []
        pieces: list[str] = []
        finish, content = "", ""
        for chunk in _ask(client, seed, choice, parallel_tool_calls=False, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or []:
                assert call.index == 0
                names += [call.function.name] if call.function.name else []
                pieces += [call.function.arguments] if call.function.arguments else []
            finish = chunk.choices[0].finish_reason or finish
        assert not content, "markup or chatter leaked"
        assert len(names) == 1
        assert whole.message.tool_calls[0].function.name == names[0]
        assert whole.message.tool_calls[0].function.arguments == "".join(pieces)
        assert whole.finish_reason == finish
        if finish == "tool_calls":
            jsonschema.validate(json.loads("".join(pieces)), SCHEMAS[names[0]])
            assert len(pieces) > 1
        if choice is NAMED:
            assert names == ["weather"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(COUNT)))


def test_none_never_calls(client: openai.OpenAI) -> None:
    message = _ask(client, 1, "none", max_tokens=24).choices[0].message
    assert message.tool_calls is None


def test_an_unknown_named_tool_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="weather"):
        _ask(client, 1, {"type": "function", "function": {"name": "nope"}})


def test_a_tool_loop_renders_calls_and_results(client: openai.OpenAI) -> None:
    first = _ask(client, 3, "required", parallel_tool_calls=False).choices[0].message
    call = first.tool_calls[0]
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
        ],
        tools=TOOLS,
        temperature=0,
        max_tokens=16,
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_tools_and_a_demanded_form_together(client: openai.OpenAI) -> None:
    answer = _ask(
        client,
        5,
        "auto",
        response_format={"type": "json_schema", "json_schema": {"name": "g", "schema": OTHER}},
    ).choices[0]
    if answer.finish_reason == "tool_calls":
        for call in answer.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    elif answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.message.content), OTHER)
