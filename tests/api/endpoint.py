"""An endpoint as tests that hold all protocols to one bar see it: asked alike, and read alike.

Sampling fields are in chat's words; each endpoint knows where it has a field for them. What it answers,
whole or streamed, is read as a client of its own would, into one and the same `Said`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import httpx


class Call(NamedTuple):
    name: str
    arguments: str
    """As JSON in one spelling, or as they came where they are no JSON."""


def called(name: str, arguments: Any) -> Call:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Call(name, arguments)
    return Call(name, json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Said:
    """An answer. What may differ when it is asked for again is not compared."""

    text: str
    finish: str
    """stop, length or calls."""
    prompt: int
    generated: int
    matched: str | int | None = None
    """Where the protocol tells it."""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    thinking: int | None = None
    """Tokens of thoughts, where the protocol tells them."""
    cached: int | None = field(default=None, compare=False)
    ids: tuple[str, ...] = field(default=(), compare=False)
    """Of the calls."""
    pieces: tuple[str, ...] = field(default=(), compare=False)
    """The text as it came in a stream."""
    spelled: tuple[str, ...] = field(default=(), compare=False)
    """The arguments as they came in a stream."""
    turn: tuple[dict[str, Any], ...] = field(default=(), compare=False, repr=False)
    """What a client adds to the conversation before it goes on."""
    raw: Any = field(default=None, compare=False, repr=False)


class Frame(NamedTuple):
    name: str | None
    data: Any
    """`[DONE]` as it is, all else decoded."""


def frames(lines: Iterator[str]) -> list[Frame]:
    """Server-sent events, or lines of JSON."""
    found: list[Frame] = []
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith(("data: ", "{")):
            data = line.removeprefix("data: ")
            found.append(Frame(name, data if data == "[DONE]" else json.loads(data)))
            name = None
    return found


SAMPLING = (
    "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "seed", "logit_bias",
    "ignore_eos", "stop",
)  # fmt: skip
SHARED = (*SAMPLING, "max_tokens", "model", "cache_salt", "timeout")


class Endpoint:
    name: ClassVar[str]
    path: ClassVar[str]
    where: ClassVar[dict[str, str]] = {}
    """Wish → field, with dots for fields inside others; what is not here cannot be said."""
    history: ClassVar[str] = "messages"
    """The field of the conversation so far."""
    is_raw = False
    """Takes a text to go on with, not a conversation."""
    end = ""
    """What the last event of a stream is."""

    def ask(self, say: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": say}]}

    def body(self, say: str, **wishes: Any) -> dict[str, Any]:
        body = self.ask(say)
        for wish, value in wishes.items():
            *outer, last = self.where[wish].split(".")
            place = body
            for step in outer:
                place = place.setdefault(step, {})
            place[last] = self.shaped(wish, value)
        return body

    def shaped(self, wish: str, value: Any) -> Any:
        if wish == "tools":
            return [{"type": "function", "function": f} for f in value]
        return value

    def results(self, said: Said, outputs: Sequence[str]) -> list[dict[str, Any]]:
        """What a client adds once it has run the calls."""
        raise NotImplementedError

    def whole(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        response = client.post(self.path, json={**body, "stream": False}, **more)
        assert response.status_code == 200, response.text
        return self.read(response.json())

    def stream(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Said:
        with self.open(client, body, **more) as response:
            assert response.status_code == 200, response.read()
            return self.fold(frames(response.iter_lines()))

    def open(self, client: httpx.Client, body: Mapping[str, Any], **more: Any) -> Any:
        return client.stream("POST", self.path, json={**body, "stream": True}, **more)

    def read(self, answer: Any) -> Said:
        raise NotImplementedError

    def fold(self, found: list[Frame]) -> Said:
        """The answer of a stream, whose frame must be as the protocol has it."""
        raise NotImplementedError

    def error(self, response: httpx.Response) -> str:
        """The message of an error in the protocol's own shape."""
        return self.trouble(response.json())

    def trouble(self, reported: Any) -> str:
        assert set(reported) == {"error"}
        assert set(reported["error"]) == {"message", "type", "param", "code"}
        return str(reported["error"]["message"])

    def __repr__(self) -> str:
        return self.name
