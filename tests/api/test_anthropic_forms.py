"""Demanded forms and demanded calls on the Messages API, with a real model: behaviours 27 and 29."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import jsonschema
import pydantic
import pytest
from api.anthropic_help import client_of, plain
from conftest import Server

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "Looks at the sky.", "input_schema": PLACE},
    {
        "name": "greet",
        "input_schema": {
            "type": "object",
            "properties": {"to": {"type": "string", "maxLength": 8}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
]
SCHEMAS = {tool["name"]: tool["input_schema"] for tool in TOOLS}


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return client_of(server)


def _both(client: anthropic.Anthropic, **asked: Any) -> anthropic.types.Message:
    asked = {
        "model": "smollm2",
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "extra_body": {"temperature": 0},
    } | asked
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert plain(stream.get_final_message()) == plain(whole)
    return whole


class Place(pydantic.BaseModel):
    city: Literal["Paris", "London", "Rome"]
    warm: bool


def test_structured_output_validates(client: anthropic.Anthropic) -> None:
    answer = _both(client, output_config={"format": {"type": "json_schema", "schema": PLACE}})
    assert answer.stop_reason == "end_turn"
    (block,) = answer.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), PLACE)
    # The older name of the field.
    older = {"temperature": 0, "output_format": {"type": "json_schema", "schema": PLACE}}
    assert _both(client, extra_body=older).content == answer.content


def test_the_sdks_parse_helper(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model="smollm2",
        max_tokens=60,
        messages=[{"role": "user", "content": "Is Paris warm?"}],
        output_format=Place,
    )
    assert isinstance(parsed.parsed_output, Place)


def test_any_always_calls_and_the_input_validates(client: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = _both(client, tools=TOOLS, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    (use,) = answer.content
    assert use.type == "tool_use"
    jsonschema.validate(use.input, SCHEMAS[use.name])


def test_a_named_tool_is_the_one_that_is_called(client: anthropic.Anthropic) -> None:
    for name in ("weather", "greet"):
        answer = _both(client, tools=TOOLS, tool_choice={"type": "tool", "name": name})
        (use,) = answer.content
        assert use.type == "tool_use" and use.name == name
        jsonschema.validate(use.input, SCHEMAS[name])


def test_strict_tools_and_a_form_together(client: anthropic.Anthropic) -> None:
    tools = [tool | {"strict": True} for tool in TOOLS]
    answer = _both(client, tools=tools, max_tokens=40)
    for block in answer.content:
        if block.type == "tool_use" and answer.stop_reason == "tool_use":
            jsonschema.validate(block.input, SCHEMAS[block.name])
    form = {"format": {"type": "json_schema", "schema": PLACE}}
    one = {"type": "auto", "disable_parallel_tool_use": True}
    answer = _both(client, tools=tools, output_config=form, tool_choice=one)
    (block,) = answer.content
    if block.type == "tool_use":
        jsonschema.validate(block.input, SCHEMAS[block.name])
    elif block.type == "text":
        jsonschema.validate(json.loads(block.text), PLACE)


def test_a_real_answer_goes_on_from_its_beginning(client: anthropic.Anthropic) -> None:
    begun = "The capital of France is"
    asked = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": begun},
    ]
    answer = _both(client, messages=asked, max_tokens=6)
    assert answer.content[0].type == "text"
    assert "Paris" in answer.content[0].text and begun not in answer.content[0].text
