"""Lists of a client's that are as long as a body may have them: read in linear time, or refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from conftest import Server

from millrace.api import decoding
from millrace.api.body import convert
from millrace.api.ollama.messages import turns_of
from millrace.api.ollama.schema import OllamaMessage
from millrace.api.responses.items import read_items
from millrace.api.responses.messages import to_messages
from millrace.api.responses.prepare import _all_tools
from millrace.api.responses.schema import ResponsesRequest
from millrace.errors import BadRequest
from millrace.serving.ignored import in_a_header
from millrace.serving.toolbox import MOST_TOOLS, choose, open_tools

T = TypeVar("T")
GENEROUS = 20.0
"""Seconds for a linear pass on a busy machine; a quadratic one takes longer on any."""
HELLO = [{"role": "user", "content": "hi"}]


def quick(work: Callable[[], T]) -> T:
    began = time.monotonic()
    found = work()
    assert time.monotonic() - began < GENEROUS
    return found


def test_results_find_their_calls_among_many() -> None:
    many = 40_000
    calls = [{"function": {"name": f"f{n}"}} for n in range(many)]
    results = [
        {"role": "tool", "content": "x", "tool_name": f"f{n}"} for n in reversed(range(many))
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, *results]
    wire = msgspec.convert(messages, list[OllamaMessage])
    turns = quick(lambda: turns_of(wire))
    assert [t.call_id for t in turns[1:]] == [f"call_{n}" for n in reversed(range(many))]


def test_results_without_a_name_answer_the_oldest_call_that_is_open() -> None:
    calls = [
        {"id": id, "function": {"name": name}} for id, name in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "b"},
        {"role": "tool", "tool_name": "x"},
        {"role": "tool"},
        {"role": "tool", "tool_name": "z"},
    ]
    wire = msgspec.convert(
        [{"role": "assistant", "tool_calls": calls}, *results], list[OllamaMessage]
    )
    turns = turns_of(wire)[1:]
    assert [(t.call_id, t.name) for t in turns] == [("b", "y"), ("a", "x"), ("c", "x"), (None, "z")]


def test_many_thoughts_and_words_of_one_turn_are_put_together_once() -> None:
    many, text = 30_000, "t" * 1000
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": text}
    items = read_items([*HELLO, *[thought] * many, call, *[said] * many])
    turns = quick(lambda: to_messages(items, None))
    assert len(turns) == 2
    assert turns[1].content == text * many
    assert turns[1].reasoning is not None and len(turns[1].reasoning) == many * 1002 - 2


def test_tools_that_items_add_are_told_apart_in_linear_time() -> None:
    tools = [{"type": "function", "name": f"f{n}", "strict": True} for n in range(30_000)]
    again = [{"strict": True, "name": "f7", "type": "function"}]
    items = read_items([{"type": "additional_tools", "tools": tools + again}])
    wire = convert({"input": "a", "tools": tools[:5]}, ResponsesRequest)
    assert quick(lambda: _all_tools(wire, items)) == tools


def test_a_choice_among_all_tools_of_a_group() -> None:
    names = [f"f{n}" for n in range(MOST_TOOLS)]
    members = [{"type": "function", "name": name} for name in names]
    box = open_tools([{"type": "namespace", "name": "g", "tools": members}])
    chosen = quick(lambda: choose({"type": "allowed_tools", "tools": members}, box))
    assert [f["function"]["name"] for f in chosen.functions] == [f"g__{name}" for name in names]
    with pytest.raises(BadRequest, match="2049 tools"):
        open_tools([{"type": "namespace", "name": "g", "tools": [*members, members[0]]}])


def test_a_header_names_no_more_than_it_shows() -> None:
    seen: list[str] = []

    class Watched(str):
        def encode(self, *args: Any, **more: Any) -> bytes:
            seen.append(self)
            return super().encode(*args, **more)

    text = in_a_header(Watched(f"field{n}") for n in range(100_000))
    assert len(text) == 2003 and text.startswith("field0, field1, ") and text.endswith("...")
    assert len(seen) < 400


@pytest.mark.parametrize(
    ("part", "word"),
    [("{}", "objects"), ("[]", "objects"), ('{"a":1,"b":1,"c":1,"d":1}', "fields")],
)
def test_a_body_has_no_more_parts_than_are_read_at_once(part: str, word: str) -> None:
    many = decoding.MOST_CONTAINERS if word == "objects" else 80_000
    data = ('{"a":[' + ",".join([part] * many) + "]}").encode()
    with pytest.raises(BadRequest, match=f"more than .* {word}"):
        decoding.decode_large(data)


CHAT = {"messages": HELLO, "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", CHAT | {"tools": [TOOL] * 3000}, "tools", ("3000", "2048")),
        ("/v1/chat/completions", CHAT | {"functions": [{"name": "f"}] * 3000}, "tools", ("3000",)),
        ("/v1/responses", {"input": "a", "tools": [{"type": "x"}] * 3000}, "tools", ("3000",)),
        (
            "/v1/chat/completions",
            CHAT | {"stop_token_ids": [5] * 5000},
            "stop_token_ids",
            ("4096",),
        ),
        (
            "/v1/chat/completions",
            CHAT | {"logit_bias": {str(n): 1 for n in range(70_000)}},
            "logit_bias",
            ("65536",),
        ),
        (
            "/v1/chat/completions",
            CHAT | {"chat_template_kwargs": {f"x{n}": 1 for n in range(2000)}},
            "chat_template_kwargs",
            ("1024",),
        ),
        (
            "/v1/responses",
            {"input": "a", "metadata": {f"x{n}": "1" for n in range(2000)}},
            "metadata",
            ("1024",),
        ),
        ("/v1/chat/completions", CHAT | {f"x{n}": 1 for n in range(2000)}, None, ("2002", "1024")),
        (
            "/v1/chat/completions",
            CHAT | {"extra_body": {f"x{n}": 1 for n in range(2000)}},
            "extra_body",
            ("2000", "1024"),
        ),
    ],
)
def test_longer_lists_are_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str | None, words: tuple[str, ...]
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


def test_the_others_protocols_name_them_too(server: Server) -> None:
    tools = [{"name": "f", "input_schema": {}}] * 3000
    anthropic = {"model": "x", "max_tokens": 1, "messages": HELLO, "tools": tools}
    told = server.post("/v1/messages/count_tokens", anthropic | {"model": None})
    assert told.status_code == 400 and "2048" in told.json()["error"]["message"]
    ollama = {"messages": HELLO, "options": {f"x{n}": 1 for n in range(2000)}}
    told = server.post("/api/chat", ollama)
    assert told.status_code == 400 and "options has 2000 fields" in told.json()["error"]
