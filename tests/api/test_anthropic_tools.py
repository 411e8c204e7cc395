"""The real anthropic SDK against a scripted model: calls and their loop, stops, prefill, streams.

Behaviours 7, 9, 11, 14, 25 to 28 and 31; rows 3.1.1 and 3.2.1 of the table of stop sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from api import claude_code
from api.anthropic_help import HELLO, client_of, events, plain, serve_script
from conftest import Server
from scripted import Rule, call

STEP = {
    "name": "step",
    "description": "Go one step further.",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["n"],
    },
}
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: list[Any] = [STEP, WEATHER]
COUNT = [{"role": "user", "content": "Count 1-10"}]
RULES = [
    *(Rule(f"done {n}.", call("step", n=n + 1, note='Zürich ☃ "q"')) for n in range(1, 6)),
    Rule("done 6.", "All six steps are done."),
    Rule("Start the chain", "I begin.\n" + call("step", n=1)),
    Rule("two places", call("weather", city="Bern") + "\n" + call("weather", city="Rome")),
    Rule("mixed", "Before.\n" + call("weather", city="Bern") + "\nAfter."),
    Rule("unknown tool", call("rm", path="/")),
    Rule("Count 1-10", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    Rule("world", "I say hello world to you."),
    Rule("sunny", "Take a hat."),
    Rule("", "Hello there, friend."),
]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("anthropic")
    yield from serve_script(folder, default_model, RULES, "hermes", "--name", "hermes")


@pytest.fixture(scope="module")
def client(hermes: Server) -> anthropic.Anthropic:
    return client_of(hermes)


def _both(client: anthropic.Anthropic, **asked: Any) -> anthropic.types.Message:
    """An answer, whole and streamed, which must be the same."""
    asked = {"model": "hermes", "max_tokens": 200, "messages": HELLO} | asked
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        said = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert said == "".join(b.text for b in whole.content if b.type == "text")
    return whole


def test_a_message_and_its_stream_are_the_same(client: anthropic.Anthropic) -> None:
    message = _both(client)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "hermes")
    (block,) = message.content
    assert block.type == "text" and block.text == "Hello there, friend."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 3


def test_the_order_of_events_and_real_counts_from_the_start(hermes: Server) -> None:
    body = {"max_tokens": 200, "tools": TOOLS, "messages": [{"role": "user", "content": "mixed"}]}
    reported = events(hermes, body)
    kinds = [e["type"] for e in reported if e["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    starts = [e for e in reported if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1, 2]
    assert [e["content_block"]["type"] for e in starts] == ["text", "tool_use", "text"]
    assert starts[1]["content_block"]["input"] == {}
    open_at = None
    for event in reported:
        if event["type"] == "content_block_start":
            assert open_at is None
            open_at = event["index"]
        elif event["type"] in ("content_block_delta", "content_block_stop"):
            assert event["index"] == open_at
            if event["type"] == "content_block_stop":
                open_at = None
    begun, ended = reported[0]["message"]["usage"], reported[-2]["usage"]
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    counted = hermes.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    for usage in (begun, ended):
        assert sum(usage[k] for k in inputs) == counted
    assert reported[0]["message"]["stop_reason"] is None
    assert reported[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_what_the_cache_gave_is_told_at_the_start_and_at_the_end(hermes: Server) -> None:
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "a prompt to keep " * 9}]}
    events(hermes, body)
    reported = events(hermes, body)
    begun, ended = reported[0]["message"]["usage"], reported[-2]["usage"]
    assert begun["cache_read_input_tokens"] == ended["cache_read_input_tokens"] > 20
    assert begun["input_tokens"] + begun["cache_creation_input_tokens"] == 1


def test_typed_events_of_the_stream_helper(client: anthropic.Anthropic) -> None:
    seen: dict[str, int] = {}
    with client.messages.stream(
        model="hermes",
        max_tokens=200,
        tools=TOOLS,
        messages=[{"role": "user", "content": "mixed"}],
    ) as stream:
        for event in stream:
            seen[event.type] = seen.get(event.type, 0) + 1
            if event.type == "input_json":
                assert isinstance(event.snapshot, dict)
    assert seen["text"] >= 2
    assert seen["input_json"] > 1, "arguments come in pieces as they are made"
    assert seen["message_stop"] == 1


def test_a_tool_loop_of_six_turns(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Start the chain"}]
    for n in range(1, 7):
        answer = _both(client, messages=messages, tools=TOOLS)
        assert answer.stop_reason == "tool_use"
        *before, use = answer.content
        assert use.type == "tool_use" and use.name == "step" and use.id.startswith("toolu_")
        assert use.input == ({"n": 1} if n == 1 else {"n": n, "note": 'Zürich ☃ "q"'})
        assert [b.text for b in before if b.type == "text"] == (["I begin."] if n == 1 else [])
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"done {n}."}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    last = _both(client, messages=messages, tools=TOOLS)
    assert last.stop_reason == "end_turn"
    assert last.content[0].type == "text" and last.content[0].text == "All six steps are done."


def test_the_beta_tool_runner(client: anthropic.Anthropic) -> None:
    taken: list[int] = []

    @anthropic.beta_tool
    def step(n: int, note: str = "") -> str:
        """Go one step further.

        Args:
            n: Which one.
            note: Anything.
        """
        taken.append(n)
        return f"done {n}."

    final = client.beta.messages.tool_runner(
        model="hermes",
        max_tokens=200,
        tools=[step],
        messages=[{"role": "user", "content": "Start the chain"}],
    ).until_done()
    assert taken == [1, 2, 3, 4, 5, 6]
    assert final.content[-1].type == "text" and "All six" in final.content[-1].text


def test_two_calls_in_one_answer_have_ids_of_their_own(client: anthropic.Anthropic) -> None:
    asked = {"messages": [{"role": "user", "content": "two places"}], "tools": TOOLS}
    answer = _both(client, **asked)
    uses = [b for b in answer.content if b.type == "tool_use"]
    assert [u.input for u in uses] == [{"city": "Bern"}, {"city": "Rome"}]
    assert len({u.id for u in uses}) == 2
    one = _both(client, **asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [b.input for b in one.content if b.type == "tool_use"] == [{"city": "Bern"}]


def test_results_of_tools_as_blocks_and_as_errors(client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "is_error": True,
        "content": [{"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}],
    }
    said = {"type": "text", "text": "And now?"}
    for content in ([result], [result, said], [said, result]):
        asked: list[Any] = [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": content},
        ]
        answer = _both(client, messages=asked, tools=TOOLS)
        expected = "Take a hat." if len(content) == 1 else "Hello there, friend."
        assert answer.content[0].type == "text" and answer.content[0].text == expected


def test_without_tools_a_call_is_no_call(client: anthropic.Anthropic) -> None:
    asked = [{"role": "user", "content": "two places"}]
    for more in ({}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
        answer = _both(client, messages=asked, **more)
        assert [b.type for b in answer.content] == ["text"]
        assert answer.stop_reason == "end_turn"
    answer = _both(client, messages=[{"role": "user", "content": "unknown tool"}], tools=TOOLS)
    assert [b.type for b in answer.content] == ["text"], "a tool that was not offered"


@pytest.mark.parametrize("limit", range(4, 22, 3))
def test_a_truncated_call_is_reported_as_max_tokens(
    hermes: Server, client: anthropic.Anthropic, limit: int
) -> None:
    asked: list[Any] = [{"role": "user", "content": "Start the chain"}]
    whole = client.messages.create(model="hermes", max_tokens=limit, messages=asked, tools=TOOLS)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == limit
    with client.messages.stream(
        model="hermes", max_tokens=limit, messages=asked, tools=TOOLS
    ) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "max_tokens"
    text = "".join(b.text for b in whole.content if b.type == "text")
    assert text == "".join(b.text for b in streamed.content if b.type == "text")
    assert "I begin.".startswith(text.rstrip())
    calls = [(b.name, b.input) for b in whole.content if b.type == "tool_use"]
    assert calls == [(b.name, b.input) for b in streamed.content if b.type == "tool_use"]
    reported = events(hermes, {"max_tokens": limit, "messages": asked, "tools": TOOLS})
    begun = [e["content_block"]["type"] for e in reported if e["type"] == "content_block_start"]
    assert begun == [b.type for b in whole.content]


def test_stop_row_3_1_1_and_3_2_1(hermes: Server, client: anthropic.Anthropic) -> None:
    answer = _both(client, messages=COUNT, stop_sequences=["6"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "6")
    assert answer.content[0].type == "text" and answer.content[0].text == "1, 2, 3, 4, 5, "
    body = {"messages": COUNT, "max_tokens": 200, "temperature": 0, "stop_sequences": ["6"]}
    delta = next(e for e in events(hermes, body) if e["type"] == "message_delta")
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "6"}


def test_stops_of_several_tokens_are_cut_across_their_borders(client: anthropic.Anthropic) -> None:
    answer = _both(
        client, messages=[{"role": "user", "content": "world"}], stop_sequences=["hello world"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "hello world")
    assert answer.content[0].type == "text" and answer.content[0].text == "I say "
    answer = _both(client, messages=COUNT, stop_sequences=["7", "6, 7", "6, 7, 8"])
    assert answer.stop_sequence == "6, 7, 8", "the earliest wins, the longest of those there"
    answer = _both(client, messages=COUNT, stop_sequences=["never", "6, 8"])
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


def test_what_is_no_stop_sequence(hermes: Server) -> None:
    for stops in ([""], ["a"] * 65, "6", [6]):
        body = {"messages": COUNT, "max_tokens": 5, "stop_sequences": stops}
        response = hermes.post("/v1/messages", body)
        assert response.status_code == 400
        assert "stop_sequences" in response.json()["error"]["message"]
    body = {"messages": COUNT, "max_tokens": 200, "stop_sequences": [f"x{n}" for n in range(64)]}
    assert hermes.post("/v1/messages", body).json()["stop_reason"] == "end_turn"


def test_max_tokens_is_the_reason_at_the_cap(client: anthropic.Anthropic) -> None:
    answer = _both(client, messages=COUNT, max_tokens=3)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 3
    # More than the window has is capped, as agents expect.
    capped = _both(client, messages=COUNT, max_tokens=10_000_000, timeout=60)
    assert capped.stop_reason == "end_turn"


def test_a_last_message_of_the_assistant_is_gone_on_with(client: anthropic.Anthropic) -> None:
    whole = _both(client, messages=COUNT).content[0]
    assert whole.type == "text"
    for begun in ("1, 2, 3", "1, 2, 3,  ", [{"type": "text", "text": "1, 2"}]):
        asked = [*COUNT, {"role": "assistant", "content": begun}]
        rest = _both(client, messages=asked).content[0]
        assert rest.type == "text"
        said = begun if isinstance(begun, str) else "1, 2"
        assert said.rstrip() + rest.text == whole.text, "the beginning is not repeated"
    for nothing in ("", []):
        asked = [*COUNT, {"role": "assistant", "content": nothing}]
        assert _both(client, messages=asked).content == [whole]


def test_system_as_text_and_as_blocks_and_in_the_middle(
    hermes: Server, client: anthropic.Anthropic
) -> None:
    blocks = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    count = client.messages.count_tokens
    as_text = count(model="hermes", messages=HELLO, system="Be brief.\nBe kind.")
    assert as_text == count(model="hermes", messages=HELLO, system=blocks)  # type: ignore[arg-type]
    assert as_text.input_tokens > count(model="hermes", messages=HELLO).input_tokens
    late = {"role": "system", "content": [{"type": "text", "text": "Now be quick."}]}
    answer = _both(client, messages=[*HELLO, late], system=blocks)
    assert answer.content[0].type == "text" and answer.content[0].text == "Hello there, friend."
    longer = count(model="hermes", messages=[*HELLO, late], system=blocks)  # type: ignore[list-item]
    assert longer.input_tokens > as_text.input_tokens + 3


def test_claude_codes_request_is_answered_and_counted(hermes: Server) -> None:
    body = claude_code.body()
    reported = events(hermes, body, headers=claude_code.HEADERS, params={"beta": "true"})
    assert "".join(_texts(reported)) == "Hello there, friend."
    counted = hermes.post(
        "/v1/messages/count_tokens?beta=true",
        {k: body[k] for k in ("system", "messages", "tools", "thinking", "context_management")},
        headers=claude_code.HEADERS,
    ).json()["input_tokens"]
    usage = reported[-2]["usage"]
    assert sum(v for k, v in usage.items() if "input" in k) == counted > 3000
    whole = hermes.post("/v1/messages?beta=true", body | {"stream": False})
    assert whole.headers["x-millrace-ignored"] == "output_config.effort, thinking"
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    more = hermes.post("/v1/messages", {"max_tokens": 2, "messages": HELLO, "tools": [hosted]})
    assert more.headers["x-millrace-ignored"] == "tools.web_search"


def _texts(reported: list[dict[str, Any]]) -> list[str]:
    deltas = [e["delta"] for e in reported if e["type"] == "content_block_delta"]
    return [d["text"] for d in deltas if d["type"] == "text_delta"]


def test_headers_ids_and_the_root(hermes: Server, client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(model="hermes", max_tokens=3, messages=HELLO)
    message = raw.parse()
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == message.id
    assert message._request_id == message.id
    response = hermes.post(
        "/v1/messages?beta=true",
        {"max_tokens": 3, "messages": HELLO, "metadata": {"user_id": "u"}, "novel": 1},
        headers={"x-request-id": "mine", "anthropic-beta": "a-1,b-2", "anthropic-version": "x"},
    )
    assert response.json()["id"] == response.headers["request-id"] == "mine"
    assert response.headers["x-millrace-ignored"] == "novel"
    assert httpx.head(f"{hermes.url}/").status_code == 200
    about = hermes.http.get("/").json()
    assert about["name"] == "millrace" and about["version"]
