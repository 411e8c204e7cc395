"""instructor over OpenAI's chat and Responses and over Anthropic's messages, in the modes it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from conftest import Server
from instructor import Mode

from clients.asked import Odder, Person, Small, leaves
from clients.conftest import KEY
from clients.script import HELLO, PERSON

CALLED = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS, Mode.ANTHROPIC_TOOLS]
CHAT = [*CALLED[:3], Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON]


def _openai(server: Server, mode: Mode) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def _anthropic(server: Server, mode: Mode) -> Any:
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    return instructor.from_anthropic(client, mode=mode)


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def _limit(mode: Mode, tokens: int = 400) -> dict[str, Any]:
    return {"max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens": tokens}


def _question(mode: Mode, partial: bool = False) -> list[Any]:
    # Where parts are wanted, the tool is named after a type that instructor makes.
    way = "a partial call" if partial else "a call of Person"
    return _user(f"describe by {way}" if mode in CALLED else "describe it")


@pytest.mark.parametrize("mode", CHAT, ids=str)
def test_a_person_over_openai(agent: Server, mode: Mode) -> None:
    client = _openai(agent, mode)
    how: dict[str, Any] = {"response_model": Person, "model": "agent", "max_retries": 0}
    found = client.create(messages=_question(mode), **how, **_limit(mode))
    assert found.model_dump() == PERSON
    if mode is not Mode.MD_JSON:
        *_, last = client.create_partial(messages=_question(mode, True), **how, **_limit(mode))
        assert last.model_dump() == PERSON


@pytest.mark.parametrize("mode", [Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON], ids=str)
def test_a_person_over_anthropic(agent: Server, mode: Mode) -> None:
    client = _anthropic(agent, mode)
    how: dict[str, Any] = {"response_model": Person, "model": "agent", "max_tokens": 400}
    found = client.create(messages=_question(mode), max_retries=0, **how)
    assert found.model_dump() == PERSON
    *_, last = client.create_partial(messages=_question(mode, True), max_retries=0, **how)
    assert last.model_dump() == PERSON


def test_several_people(agent: Server) -> None:
    how: dict[str, Any] = {"model": "agent", "max_retries": 0, "max_tokens": 400}
    several = _openai(agent, Mode.TOOLS).create_iterable(
        response_model=Person, messages=_user("describe several"), **how
    )
    assert [p.model_dump() for p in several] == [PERSON, PERSON]
    parallel = _openai(agent, Mode.PARALLEL_TOOLS).create(
        response_model=Iterable[Person], messages=_user("describe by two calls"), **how
    )
    assert [p.model_dump() for p in parallel] == [PERSON, PERSON]


def test_a_plain_chat(agent: Server) -> None:
    answer = _openai(agent, Mode.TOOLS).create(
        response_model=None, model="agent", messages=_user("hi"), max_tokens=40
    )
    assert answer.choices[0].message.content == HELLO


def test_an_odd_schema(agent: Server, smol: Server) -> None:
    for mode in (Mode.JSON, Mode.JSON_SCHEMA):
        found = _openai(agent, mode).create(
            response_model=Odder,
            model="agent",
            messages=_user("describe odder things"),
            max_retries=0,
            max_tokens=400,
        )
        assert (found.size, found.name, found.level) == (2, None, 3)
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        small = _openai(smol, mode).create(
            response_model=Small,
            model="smollm2",
            messages=_user("Make one."),
            max_retries=0,
            **_limit(mode, 200),
        )
        assert isinstance(small, Small)
    small = _anthropic(smol, Mode.ANTHROPIC_TOOLS).create(
        response_model=Small,
        model="smollm2",
        messages=_user("Make one."),
        max_retries=0,
        max_tokens=200,
    )
    assert isinstance(small, Small)


def test_a_client_that_stops_reading_leaves_nothing(agent: Server) -> None:
    plain = openai.AsyncOpenAI(base_url=f"{agent.url}/v1", api_key=KEY, max_retries=0)
    client = instructor.from_openai(plain, mode=Mode.MD_JSON)

    async def leave() -> None:
        how: dict[str, Any] = {"model": "agent", "max_tokens": 2500, "max_retries": 0}
        asked = client.create(response_model=Person, messages=_user("talk on"), **how)
        await leaves(agent, asked)

    asyncio.run(leave())
