"""The Messages API without a server: messages into turns, pieces into blocks, what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from api import claude_code
from hypothesis import given
from hypothesis import strategies as st

from millrace.api.anthropic.blocks import Blocks, Folding
from millrace.api.anthropic.effort import effort_word
from millrace.api.anthropic.events import StreamEvent, encoded
from millrace.api.anthropic.messages import conversation_of
from millrace.api.anthropic.prepare import PreparedRequest, prepare
from millrace.api.anthropic.schema import AnthropicMessage, MessagesRequest, PromptFields, Text
from millrace.errors import BadRequest
from millrace.text.deltas import (
    Content,
    Delta,
    Idle,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from millrace.text.dialect import Dialect
from millrace.text.formats import thinking_controls
from millrace.text.template import ChatTemplate
from millrace.text.tokenizer import Tokenizer


def _turns(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    turns = conversation_of(system, msgspec.convert(list(messages), list[AnthropicMessage]))
    return [turn.rendered() for turn in turns]


def _user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = _turns(
        _user(_text("a")),
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [_text("d")]},
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
        system="s",
    )
    assert [(t["role"], t["content"]) for t in turns] == [
        ("system", "s"),
        ("user", "a\nb"),
        ("assistant", "c\nd"),
        ("system", "e"),
        ("user", "f"),
    ]


def test_results_come_right_after_their_calls() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [_text("r"), _text("s")]}
    broken = {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True}
    turns = _turns(
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                _text("I look."),
                use,
                use | {"id": "t2"},
            ],
        },
        _user(_text("and?"), result, broken),
    )
    assert turns[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            for id in ("t1", "t2")
        ],
    }
    assert turns[2:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "r\ns"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]


def test_documents_of_plain_text_are_text() -> None:
    page = {
        "type": "document",
        "title": "T",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    parts = {"type": "document", "source": {"type": "content", "content": [_text("E")]}}
    assert _turns(_user(page, parts, _text("?")))[0]["content"] == "T\nC\nD\nE\n?"


@pytest.fixture(scope="module")
def dialect(default_model: Path) -> Dialect:
    return Dialect(Tokenizer(default_model))


def _prepared(dialect: Dialect, **fields: Any) -> PreparedRequest:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return prepare(msgspec.convert(body, PromptFields), dialect)


def test_hosted_tools_are_left_out_and_named(dialect: Dialect) -> None:
    own = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        own,
        {"type": "custom", "name": "g", "input_schema": {}, "input_examples": [{}]},
    ]
    ready = _prepared(dialect, tools=tools)
    assert ready.ignored == ["tools.web_search", "tools.bash", "tools.g.input_examples"]
    assert ready.chat.tools[0]["function"] == {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert len(ready.chat.tools) == 2


def test_what_a_model_cannot_do_is_named_and_not_refused(dialect: Dialect) -> None:
    ready = _prepared(
        dialect,
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "max"},
        context_management={
            "edits": [
                {"type": "clear_thinking_20251015", "keep": "all"},
                {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}},
            ]
        },
        container="c",
    )
    assert sorted(ready.ignored) == [
        "container",
        "context_management.clear_tool_uses",
        "output_config.effort",
        "thinking",
    ]
    assert ready.chat.thinking_budget is None
    dialect.limit(ready.chat, "")


def test_choices_of_tools(dialect: Dialect) -> None:
    tools = [{"name": "f", "input_schema": {}}]

    def chosen(choice: Any) -> tuple[str, str | None, bool]:
        chat = _prepared(dialect, tools=tools, tool_choice=choice).chat
        return chat.tool_choice, chat.tool_name, chat.parallel

    assert chosen(None) == ("auto", None, True)
    assert chosen({"type": "auto", "disable_parallel_tool_use": True}) == ("auto", None, False)
    assert chosen({"type": "any"}) == ("required", None, True)
    assert chosen({"type": "tool", "name": "f"}) == ("required", "f", True)
    assert chosen({"type": "none"}) == ("none", None, True)


def test_threads_are_refused_in_words_that_clients_understand(dialect: Dialect) -> None:
    with pytest.raises(BadRequest, match="thread") as caught:
        _prepared(dialect, thread={"type": "create"})
    assert caught.value.details == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_claude_codes_request_is_understood(dialect: Dialect) -> None:
    wire = msgspec.convert(claude_code.body(), MessagesRequest)
    ready = prepare(wire, dialect)
    assert sorted(ready.ignored) == ["output_config.effort", "thinking"]
    assert [m.role for m in ready.chat.messages] == ["system", "user", "system"]
    assert len(ready.chat.tools) == 24
    text = dialect.render(ready.chat)
    for said in ("You are a coding agent.", "</system-reminder>", "say hi", "skills", "Extra15"):
        assert said in text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ reasoning_effort }}", "low medium high high high"),
        ("{% if thinking and reasoning_effort == 'max' %}x{% endif %}", "low medium high max max"),
        (
            "{% if thinking_effort not in ['low', 'high', 'max'] %}"
            "{{ raise_exception('no') }}{% endif %}",
            "low high high max max",
        ),
        (
            "{% if reasoning_effort not in ['low', 'high'] %}{{ raise_exception('no') }}{% endif %}",
            "low high high high high",
        ),
    ],
)
def test_effort_in_the_words_of_the_template(template: str, words: str) -> None:
    model = SimpleNamespace(template=ChatTemplate(template), controls=thinking_controls(template))
    levels = ("low", "medium", "high", "xhigh", "max")
    assert [effort_word(cast(Dialect, model), level) for level in levels] == words.split()


def _calls(index: int, pieces: list[str]) -> list[Any]:
    start = ToolCallStart(index, f"call_{index}", "f")
    return [start, *(ToolCallArguments(index, piece) for piece in pieces)]


@st.composite
def answers(draw: st.DrawFn) -> list[Any]:
    """Pieces in the orders that the text pipeline may give them."""
    pieces: list[Any] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call", "idle"]), max_size=8)):
        said = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3))
        if kind == "text":
            pieces += map(Content, said)
        elif kind == "thought":
            pieces += map(Reasoning, said)
        elif kind == "idle":
            pieces.append(Idle())
        else:
            body = json.dumps({"a": "".join(said)})
            cut = draw(st.integers(0, len(body)))
            pieces += _calls(calls, [body[:cut], body[cut:]])
            calls += 1
    return pieces


def _reported(pieces: list[Any], finish: TextFinish, shows: bool = True) -> list[StreamEvent]:
    blocks = Blocks("msg_1", "m", shows)
    usage = Usage(prompt=20, completion=7, cached=5, written=3, reasoning=2)
    stream = [p if isinstance(p, Idle) else Delta(0, p) for p in [*pieces, finish]]
    return [out for event in [*stream, usage] for out in blocks.feed(event, usage)]


@given(answers())
def test_blocks_follow_each_other_and_fold_to_the_message(pieces: list[Any]) -> None:
    reported = [msgspec.to_builtins(e) for e in _reported(pieces, TextFinish("stop"))]
    assert [reported[0]["type"], reported[1]["type"]] == ["message_start", "ping"]
    assert [e["type"] for e in reported[-2:]] == ["message_delta", "message_stop"]
    open_at, number = None, 0
    for event in reported[2:-2]:
        if event["type"] == "content_block_start":
            assert open_at is None and event["index"] == number
            open_at, number = number, number + 1
        elif event["type"] != "ping":
            assert event["index"] == open_at
            open_at = None if event["type"] == "content_block_stop" else open_at
    assert open_at is None
    folding = Folding()
    for out in _reported(pieces, TextFinish("stop")):
        folding.add(out)
    content = folding.message.content
    assert len(content) == number
    whole = msgspec.to_builtins(content)
    for kind, key in (("text", "text"), ("thinking", "thinking")):
        said = "".join(b[key] for b in whole if b["type"] == kind)
        type_ = Content if kind == "text" else Reasoning
        assert said == "".join(p.text for p in pieces if isinstance(p, type_))
    assert all(b["signature"] for b in whole if b["type"] == "thinking")
    generated = "".join(p.text for p in pieces if isinstance(p, ToolCallArguments))
    assert "".join(json.dumps(b["input"]) for b in whole if b["type"] == "tool_use") == generated


@pytest.mark.parametrize(
    ("came", "input"),
    [("", {}), ("{", {}), ('{"a": 1, "b": "cd', {"a": 1}), ("[1", {}), ('{"a": "\\ud83d', {})],
)
def test_a_call_that_was_cut_off_holds_what_is_complete_of_it(came: str, input: Any) -> None:
    pieces = [Content("x"), *_calls(0, ['{"a": 1}']), *_calls(1, [came])]
    folding = Folding()
    for out in _reported(pieces, TextFinish("length")):
        folding.add(out)
    _, first, second = msgspec.to_builtins(folding.message.content)
    assert (first["input"], second["input"]) == ({"a": 1}, input)
    assert folding.message.stop_reason == "max_tokens"


def test_reasons_usage_and_names_on_the_wire() -> None:
    for finish, reason, stop in (
        (TextFinish("stop"), "end_turn", None),
        (TextFinish("length"), "max_tokens", None),
        (TextFinish("tool_calls"), "tool_use", None),
        (TextFinish("stop", "6"), "stop_sequence", "6"),
    ):
        ending = msgspec.to_builtins(_reported([], finish)[-2])
        assert ending["delta"] == {"stop_reason": reason, "stop_sequence": stop}
        assert ending["usage"] == {
            "input_tokens": 12,
            "cache_creation_input_tokens": 3,
            "cache_read_input_tokens": 5,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 2},
        }
    assert (
        encoded(_reported([], TextFinish("stop"))[1]) == b'event: ping\ndata: {"type":"ping"}\n\n'
    )


def test_idle_streams_begin_at_once_and_ping() -> None:
    reported = _reported([Idle(), Idle(), Content("x")], TextFinish("stop"))
    names = [str(type(e).__struct_config__.tag) for e in reported]
    assert names[:4] == ["message_start", "ping", "ping", "content_block_start"]
    assert names.count("message_start") == 1


def test_a_label_for_the_servers_books_is_not_said_to_the_model() -> None:
    label = Text(text="x-anthropic-billing-header: cc_version=1; session=2;")
    hello = [AnthropicMessage(role="user", content="Hello")]
    with_label = conversation_of([label, Text(text="Be kind.")], hello)
    assert with_label == conversation_of([Text(text="Be kind.")], hello)
    assert conversation_of([label], hello) == conversation_of(None, hello)
