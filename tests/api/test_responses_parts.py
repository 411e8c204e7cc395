"""The parts of Responses that need no model: the machine, freeform input, tools, cuts, the store."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.api.encrypted_content import seal, unseal
from millrace.api.freeform import InputText
from millrace.api.responses.items import read_items
from millrace.api.responses.machine import Machine
from millrace.api.responses.messages import thought_of, to_messages
from millrace.errors import (
    BadRequest,
    Cancelled,
    EngineUnavailable,
    MillraceError,
    Unsupported,
)
from millrace.serving.toolbox import Offered, choose, flat_name, open_tools
from millrace.text.deltas import (
    Content,
    Delta,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)

OFFERED = {
    "look": Offered("function", "look"),
    "files__read": Offered("function", "read", "files"),
    "patch": Offered("custom", "patch"),
}
ECHO = {"id": "resp_1", "object": "response", "previous_response_id": None}


def run(machine: Machine, *pieces: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    events = machine.begin()
    for piece in pieces:
        events += machine.feed(Delta(0, piece))
    machine.feed(Usage(10, 5, 3, 7, 2))
    events.append(machine.end())
    # What is sent is what the events were when they were made.
    return msgspec.json.decode(msgspec.json.encode(events)), machine.response()


def types(events: list[dict[str, Any]]) -> list[str]:
    return [e["type"].removeprefix("response.") for e in events]


def test_behaviour_32_events_come_in_order_with_rising_numbers() -> None:
    events, response = run(
        Machine(ECHO, OFFERED, summary=True, sealed=True),
        Reasoning("Let me "),
        Reasoning("look."),
        Content("On"),
        Content(" it."),
        ToolCallStart(0, "call_a", "look"),
        ToolCallArguments(0, '{"at"'),
        ToolCallArguments(0, ': "sea"}'),
        ToolCallStart(1, "call_b", "files__read"),
        ToolCallArguments(1, "{}"),
        TextFinish("tool_calls"),
    )
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == response["output"] == events[-1]["response"]["output"]
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [i["id"] for i in added] == [i["id"] for i in done]
    assert all(i["status"] == "in_progress" for i in added)
    assert added[0]["summary"] == [] and added[1]["content"] == [] and added[2]["arguments"] == ""
    thought, message, look, read = done
    assert thought["summary"] == [{"type": "summary_text", "text": "Let me look."}]
    assert unseal(thought["encrypted_content"]) == thought_of(thought) == "Let me look."
    assert message["content"][0]["text"] == "On it."
    assert (look["name"], look["call_id"], look["arguments"]) == ("look", "call_a", '{"at": "sea"}')
    assert "namespace" not in look
    assert (read["name"], read["namespace"]) == ("read", "files")
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 7},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }


def test_a_thought_without_a_summary_is_reasoning_text() -> None:
    events, response = run(Machine(ECHO, {}), Reasoning("hm"), Content("ok"), TextFinish("stop"))
    assert types(events)[2:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ]
    thought = response["output"][0]
    assert thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert "encrypted_content" not in thought


def test_a_freeform_call_tells_its_text() -> None:
    events, response = run(
        Machine(ECHO, OFFERED),
        ToolCallStart(0, "call_p", "patch"),
        ToolCallArguments(0, '{"inp'),
        ToolCallArguments(0, 'ut": "*** Begin\\n+'),
        ToolCallArguments(0, '\\u00e9"}'),
        TextFinish("tool_calls"),
    )
    deltas = [e["delta"] for e in events if e["type"].endswith("custom_tool_call_input.delta")]
    assert deltas == ["*** Begin\n+", "é"]
    (call,) = response["output"]
    assert (call["type"], call["name"], call["input"]) == (
        "custom_tool_call",
        "patch",
        "*** Begin\n+é",
    )
    assert types(events)[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]


def test_a_freeform_call_that_is_no_such_object_is_its_own_input() -> None:
    _, response = run(
        Machine(ECHO, OFFERED),
        ToolCallStart(0, "c", "patch"),
        ToolCallArguments(0, '{"text": 1}'),
        TextFinish("tool_calls"),
    )
    assert response["output"][0]["input"] == '{"text": 1}'


@given(
    text=st.text(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    ascii=st.booleans(),
    more=st.booleans(),
)
def test_freeform_input_is_read_however_it_is_cut(
    text: str, cuts: list[int], ascii: bool, more: bool
) -> None:
    value = {"other": {"input": ["no", 1]}, "input": text} if more else {"input": text}
    written = json.dumps(value, ensure_ascii=ascii)
    places = sorted({0, len(written), *(c % (len(written) + 1) for c in cuts)})
    reader = InputText()
    reported = [reader.feed(written[a:b]) for a, b in itertools.pairwise(places)]
    assert "".join(reported) == text.encode("utf-8", "replace").decode()
    assert reader.found


def test_a_cut_answer_is_incomplete() -> None:
    events, response = run(
        Machine(ECHO, OFFERED),
        Content("so"),
        ToolCallStart(0, "c", "look"),
        ToolCallArguments(0, '{"a'),
        TextFinish("length"),
    )
    assert types(events)[-1] == "incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [i["status"] for i in response["output"]] == ["completed", "incomplete"]


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    events, response = run(Machine(ECHO, {}), TextFinish("stop", "6"))
    assert response["output"][0]["content"][0]["text"] == ""
    assert response["matched_stop"] == "6"
    assert types(events)[2:4] == ["output_item.added", "content_part.added"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineUnavailable("gone"), "failed", "server_error"),
        (Cancelled("stopped"), "cancelled", None),
        (BadRequest("odd"), "failed", "invalid_prompt"),
    ],
)
def test_an_error_in_the_middle_is_response_failed(
    error: MillraceError, status: str, code: str | None
) -> None:
    machine = Machine(ECHO, {})
    events = machine.begin() + machine.feed(Delta(0, Content("half")))
    events += machine.fail(error)
    assert types(events)[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "failed",
    ]
    last = events[-1]["response"]
    assert last["status"] == status
    assert (last["error"] or {}).get("code") == code
    assert last["output"][0]["status"] == "incomplete"
    assert [e["sequence_number"] for e in events] == list(range(len(events)))


def test_queued_comes_before_in_progress() -> None:
    machine = Machine(ECHO, {}, queued=True)
    events = machine.begin()
    assert types(events) == ["created", "queued"]
    assert events[0]["response"]["status"] == "queued"
    assert types(machine.feed(Delta(0, Content("x"))))[0] == "in_progress"
    assert machine.start() == []


def test_items_become_one_message_a_turn() -> None:
    items = read_items(
        [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": seal("think first")},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Looking."}],
            },
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {
                "type": "custom_tool_call",
                "call_id": "b",
                "name": "patch",
                "input": "x\ny",
                "namespace": "ed",
            },
            {"type": "function_call_output", "call_id": "a", "output": "sea"},
            {
                "type": "custom_tool_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "done"}],
            },
            {"role": "assistant", "content": "All done."},
            {"role": "user", "content": "Thanks"},
        ]
    )
    assert [m.rendered() for m in to_messages(items, "Instructions.")] == [
        {"role": "system", "content": "Instructions."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "think first",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "ed__patch", "arguments": '{"input": "x\\ny"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "sea"},
        {"role": "tool", "tool_call_id": "b", "content": "done"},
        {"role": "assistant", "content": "All done."},
        {"role": "user", "content": "Thanks"},
    ]
    kept = to_messages(items, None, only_current=True)
    assert not any(m.reasoning for m in kept)


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}, "uploaded files"),
        (
            {"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]},
            "input_image",
        ),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input_file"),
        ({"type": "web_search_call", "id": "x"}, "web_search_call"),
        ({"role": "robot", "content": "x"}, "robot"),
        ({"type": "function_call", "call_id": "a", "name": "look"}, "arguments"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ("words", "object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(item: Any, word: str) -> None:
    with pytest.raises(BadRequest, match=word) as caught:
        read_items([item])
    assert str(caught.value.param).startswith("input[0]")


def test_an_output_without_its_call_is_refused() -> None:
    items = read_items([{"type": "function_call_output", "call_id": "z", "output": "x"}])
    with pytest.raises(BadRequest, match="'z'"):
        to_messages(items, None)


TOOLS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None},
    {
        "type": "namespace",
        "name": "mcp__files__",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "description": "Reads.", "strict": True}],
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {
        "type": "custom",
        "name": "digits",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"},
    },
    {
        "type": "custom",
        "name": "words",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
]


def test_tools_are_opened_and_hosted_ones_named() -> None:
    box = open_tools(TOOLS)
    functions = {f["function"]["name"]: f["function"] for f in box.functions}
    assert list(functions) == ["look", "mcp__files__read", "patch", "digits", "words"]
    assert "strict" not in functions["look"]
    assert functions["mcp__files__read"]["strict"] is True
    assert functions["mcp__files__read"]["description"] == "[mcp__files__: Files.]\nReads."
    assert functions["patch"]["parameters"]["required"] == ["input"]
    pattern = functions["digits"]["parameters"]["properties"]["input"]["pattern"]
    assert (pattern, functions["digits"]["strict"]) == ("^(?:[0-9]+)$", True)
    assert "start: /x/" in functions["words"]["description"]
    assert list(box.ignored) == ["tools.web_search", "tools.words.format"]
    assert box.offered["mcp__files__read"] == Offered("function", "read", "mcp__files__")
    assert flat_name("group", "tool") == "group__tool"


def test_tool_choices() -> None:
    box = open_tools(TOOLS)
    assert choose(None, box).choice == choose("auto", box).choice == "auto"
    assert choose("none", box).choice == "none"
    assert choose("required", box).choice == "required"
    named = choose({"type": "function", "name": "read"}, box)
    assert (named.choice, named.name) == ("required", "mcp__files__read")
    some = choose(
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "look"}, {"type": "custom", "name": "patch"}],
        },
        box,
    )
    assert [f["function"]["name"] for f in some.functions] == ["look", "patch"]
    assert some.choice == "required"
    with pytest.raises(BadRequest, match="nope"):
        choose({"type": "function", "name": "nope"}, box)
    with pytest.raises(Unsupported, match="file_search"):
        choose({"type": "file_search"}, box)
    with pytest.raises(BadRequest, match="no function"):
        choose("required", open_tools([{"type": "web_search"}]))
    with pytest.raises(BadRequest, match="two tools"):
        open_tools([TOOLS[0], TOOLS[0]])
