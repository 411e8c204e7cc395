"""Thoughts on the Messages API, with a scripted model that thinks and the real anthropic SDK.

Behaviours 9, 11, 29 and 30: blocks of their own, budgets, switching off, and turns to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from api import claude_code
from api.anthropic_help import client_of, events, plain, prompt_tokens, serve_script
from conftest import Server
from scripted import Rule, call, think

TOOL: Any = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
RULES = [
    Rule("a hat", "You are welcome."),
    Rule("sunny", think("It is sunny, so a hat.", "Take a hat.")),
    Rule("weather", think("I must look.", "I look.\n" + call("look", "thinking", at="sky"))),
    Rule("ponder", think("word " * 120, "Done.")),
    Rule("say hi", think("They want a greeting.", "Hi!")),
    Rule("", think("Six is 6, and five is 5.", "The answer is 6.")),
]
ON = {"type": "enabled", "budget_tokens": 100}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("anthropic-thinking")
    yield from serve_script(folder, default_model, RULES, "thinking", "--name", "thinker")


@pytest.fixture(scope="module")
def client(thinker: Server) -> anthropic.Anthropic:
    return client_of(thinker)


def _both(client: anthropic.Anthropic, say: Any, **asked: Any) -> anthropic.types.Message:
    messages = [{"role": "user", "content": say}] if isinstance(say, str) else say
    asked = {"model": "thinker", "max_tokens": 400, "messages": messages} | asked
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    return whole


@pytest.mark.parametrize("wish", [None, ON, {"type": "adaptive"}])
def test_a_thought_is_a_block_before_the_text(client: anthropic.Anthropic, wish: Any) -> None:
    answer = _both(client, "What is it?", **({"thinking": wish} if wish else {}))
    thought, text = answer.content
    assert thought.type == "thinking" and thought.thinking == "Six is 6, and five is 5."
    assert thought.signature
    assert text.type == "text" and text.text == "The answer is 6."
    details = answer.usage.output_tokens_details
    assert details and 0 < details.thinking_tokens < answer.usage.output_tokens


def test_the_events_of_a_thought(thinker: Server) -> None:
    body = {"max_tokens": 400, "messages": [{"role": "user", "content": "What is it?"}]}
    reported = [e for e in events(thinker, body) if e.get("index") == 0]
    assert reported[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    kinds = [e["delta"]["type"] for e in reported[1:-1]]
    assert kinds == ["thinking_delta"] * (len(kinds) - 1) + ["signature_delta"]
    assert reported[-1]["type"] == "content_block_stop"


def test_thinking_switched_off(client: anthropic.Anthropic) -> None:
    answer = _both(client, "What is it?", thinking={"type": "disabled"})
    assert [b.type for b in answer.content] == ["text"]
    assert answer.content[0].type == "text" and answer.content[0].text == "The answer is 6."


def test_a_thinking_budget_is_enforced(client: anthropic.Anthropic) -> None:
    answer = _both(client, "ponder", thinking={"type": "enabled", "budget_tokens": 20})
    thought, text = answer.content
    assert thought.type == "thinking" and 10 < len(thought.thinking.split()) <= 20
    assert text.type == "text" and text.text == "Done."
    assert answer.stop_reason == "end_turn"


def test_stops_do_not_fire_inside_a_thought(client: anthropic.Anthropic) -> None:
    answer = _both(client, "What is it?", stop_sequences=["6"])
    thought, text = answer.content
    assert thought.type == "thinking" and "6" in thought.thinking
    assert text.type == "text" and text.text == "The answer is "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "6")
    inside = _both(
        client, "What is it?", stop_sequences=["6"], extra_body={"stop_in_reasoning": True}
    )
    assert [b.type for b in inside.content] == ["thinking"]


def test_thoughts_go_along_in_a_loop_of_tools(client: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    first = _both(client, asked, tools=[TOOL], thinking=ON)
    assert [b.type for b in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[2].type == "tool_use" and first.content[2].input == {"at": "sky"}
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "sunny"}
    answered = {"role": "user", "content": [result]}
    second = _both(
        client, [*asked, {"role": "assistant", "content": first.content}, answered], tools=[TOOL]
    )
    assert second.content[-1].type == "text" and second.content[-1].text == "Take a hat."
    without = [b for b in first.content if b.type != "thinking"]
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    for content in (without, [redacted, *without]):
        bare = client.messages.count_tokens(
            model="thinker",
            tools=[TOOL],
            messages=[*asked, {"role": "assistant", "content": content}, answered],
        )
        assert bare.input_tokens < prompt_tokens(second.usage), "the thought was in the prompt"


def test_thoughts_that_are_not_shown_are_remembered(client: anthropic.Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    hidden = _both(client, asked, tools=[TOOL], thinking=ON | {"display": "omitted"})
    shown = _both(client, asked, tools=[TOOL], thinking=ON)
    assert hidden.content[0].type == "thinking" and hidden.content[0].thinking == ""

    def next_turn(first: anthropic.types.Message) -> int:
        use = first.content[2]
        assert use.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        turns: list[Any] = [
            *asked,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        count = client.messages.count_tokens(model="thinker", messages=turns, tools=[TOOL])
        return count.input_tokens

    assert next_turn(hidden) == next_turn(shown)


def test_a_thought_that_is_cut_off(client: anthropic.Anthropic) -> None:
    answer = _both(client, "ponder", max_tokens=12)
    assert answer.stop_reason == "max_tokens"
    assert [b.type for b in answer.content] == ["thinking"]
    assert "<" not in getattr(answer.content[0], "thinking", "<")


def test_claude_codes_request_to_a_model_that_thinks(
    thinker: Server, client: anthropic.Anthropic
) -> None:
    reported = events(thinker, claude_code.body(), headers=claude_code.HEADERS)
    kinds = [e["content_block"]["type"] for e in reported if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "text"]
    whole = thinker.post("/v1/messages?beta=true", claude_code.body() | {"stream": False})
    assert [b["type"] for b in whole.json()["content"]] == ["thinking", "text"]
    assert whole.headers["x-millrace-ignored"] == "output_config.effort"
