"""What the clients' tests ask for: a tool, and shapes of answers, plain and odd."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Coroutine
from typing import Annotated, Any, Literal

import httpx
import pytest
from conftest import Server
from pydantic import BaseModel, ConfigDict, Field

from clients.conftest import KEY


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return {"Paris": "sunny"}.get(city, "mild")


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Tree(BaseModel):
    label: str
    children: list[Tree]


class Circle(BaseModel):
    type: Literal["circle"]
    radius: float


class Square(BaseModel):
    type: Literal["square"]
    side: float


class Odd(BaseModel):
    """Whatever schemas have: recursion, null, numbers in enums, names in any script, unions."""

    model_config = ConfigDict(populate_by_name=True)

    size: Literal[1, 2, 3] = Field(alias="größe")
    name: str | None = Field(alias="名前")
    kind: Literal["a", "b", "c d"]
    level: Level
    root: Tree
    shape: Annotated[Circle | Square, Field(discriminator="type")]


class Odder(Odd):
    """With what Anthropic's SDK leaves out of a schema before it is sent."""

    counts: dict[str, int]
    pair: tuple[int, str]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Dot(Closed):
    type: Literal["dot"]


class Line(Closed):
    type: Literal["line"]
    bent: bool | None


class Small(Closed):
    """Odd, and so narrow that a small model cannot ramble in it."""

    size: Literal[1, 2, 3] = Field(alias="größe")
    level: Level
    maybe: Literal["yes"] | None
    shape: Annotated[Dot | Line, Field(discriminator="type")]


def running(server: Server) -> int:
    """How many requests the server has."""
    told = httpx.get(f"{server.url}/v1/status", headers={"authorization": f"Bearer {KEY}"})
    return len(told.json()["models"][0]["requests"])


async def until_idle(server: Server, seconds: float = 10) -> None:
    """Wait until the server has no request."""
    async with asyncio.timeout(seconds):
        while running(server):
            await asyncio.sleep(0.1)


async def leaves(server: Server, asked: Coroutine[Any, Any, Any]) -> None:
    """A client that is told to stop while it is answered: the server has nothing left of it."""
    asking = asyncio.create_task(asked)
    async with asyncio.timeout(10):
        while not running(server):
            await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until_idle(server)
