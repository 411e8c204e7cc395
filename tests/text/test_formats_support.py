"""What the format tests share: tools, hostile arguments, ways to cut a text, and the fold."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.text.deltas import Content, Piece, Reasoning, ToolCallArguments, ToolCallStart
from millrace.text.formats import OutputFormat, OutputParser, ToolSpec, tool_from_openai

MATERIAL = Path(
    os.environ.get("MILLRACE_MATERIAL", Path(__file__).resolve().parents[3] / "shared" / "material")
)


def function(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    described = {key: {"description": key, **schema} for key, schema in properties.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"About {name}.",
            "parameters": {
                "type": "object",
                "properties": described,
                "required": list(required),
            },
        },
    }


WEATHER = function(
    "get_weather",
    {
        "city": {"type": "string"},
        "opts": {
            "type": "object",
            "properties": {"units": {"type": "string"}, "days": {"type": "integer"}},
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "ratio": {"type": "number"},
        "count": {"type": "integer"},
        "hourly": {"type": "boolean"},
    },
    ["city"],
)
PING = function("ping", {})
TOOLS = [WEATHER, PING]
SPECS: list[ToolSpec] = [tool_from_openai(tool) for tool in TOOLS]
HOSTILE: dict[str, Any] = {
    "city": 'Zürich "x"\nline 雪 😀 \\ back {a: [1]} </b>',
    "opts": {"units": "c'est", "days": 3},
    "tags": ["a", "b c"],
    "ratio": 1.5,
    "count": -7,
    "hourly": True,
}
TAME: dict[str, Any] = {**HOSTILE, "city": "Zürich 雪\nline", "opts": {"units": "c", "days": 3}}


@dataclass
class Answer:
    """The fold of a stream of pieces."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(n, json.loads(a)) for n, a in zip(self.names, self.arguments, strict=True)]


def fold(pieces: Iterable[Piece]) -> Answer:
    answer = Answer()
    for piece in pieces:
        match piece:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case ToolCallStart(index, identifier, name):
                assert index == len(answer.names)
                answer.names.append(name)
                answer.ids.append(identifier)
                answer.arguments.append("")
            case ToolCallArguments(index, text):
                assert index == len(answer.names) - 1
                answer.arguments[index] += text
    return answer


def counter() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def read(
    format: OutputFormat,
    chunks: Iterable[str],
    tools: Sequence[ToolSpec] | None = SPECS,
    *,
    prompt: str = "",
    truncated: bool = False,
    parallel: bool = True,
) -> list[Piece]:
    parser = OutputParser(format, tools, prompt=prompt, parallel=parallel, new_id=counter())
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return pieces + parser.finish(truncated)


def cut(text: str, rng: random.Random, longest: int = 9) -> list[str]:
    chunks = []
    while text:
        size = rng.randint(1, longest)
        chunks.append(text[:size])
        text = text[size:]
    return chunks


def special_tokens(template: str) -> set[str]:
    """The special tokens a template mentions, as its tokenizer would list them."""
    found = re.findall(
        r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜<>\s'\"{}]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?s>", template
    )
    turn_ends = {
        "<EOS>", "<seed:eos>", "<end_of_turn>", "<｜hy_eos:opensource｜>", "[e~[", "<SPECIAL_12>",
        "</assistant>", "<sep>", "<end_of_sentence>",
    }  # fmt: skip
    return set(found) | turn_ends


def answer_to(
    format: OutputFormat,
    text: str,
    tools: Sequence[ToolSpec] | None = SPECS,
    *,
    prompt: str = "",
    truncated: bool = False,
) -> Answer:
    """What `text` says, after a look that it says so whole, cut at every place and at random."""

    def said(chunks: Iterable[str]) -> Answer:
        return fold(read(format, chunks, tools, prompt=prompt, truncated=truncated))

    whole = said([text])
    assert said(list(text)) == whole
    for place in range(1, len(text)):
        assert said([text[:place], text[place:]]) == whole, place
    rng = random.Random(text)
    for _ in range(5):
        assert said(cut(text, rng)) == whole
    return whole
