"""The scripted model says its lines whatever the engine does with the rows, in every style."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted
from conftest import Server
from scripted import Rule, Style, call, think

LONG = " ".join(f"line {n}," for n in range(120))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _rules(style: Style) -> list[Rule]:
    return [
        Rule("sunny", "It is sunny in Zürich 😀."),
        Rule("weather", call("get_weather", style, city="Zürich")),
        Rule(
            "both", call("get_weather", style, city="Bern") + "\n" + call("get_weather", city="x")
        ),
        Rule("recite", LONG),
        Rule("ponder", "Fine." if style == "hermes" else think("Hm, hm, hm, hm.", "Fine.", style)),
        Rule("", "Hello."),
    ]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[Callable[[Style], Server]]:
    running: dict[str, Server] = {}

    def of(style: Style) -> Server:
        if style not in running:
            folder = scripted.make(
                tmp_path_factory.mktemp("scripted") / style, default_model, _rules(style), style
            )
            running[style] = Server(str(folder), "--trust-remote-code").wait_ready()
        return running[style]

    yield of
    for server in running.values():
        server.stop()


def _ask(server: Server, messages: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    answer = server.post("/v1/chat/completions", {"messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _text(server: Server, prompt: str, **more: Any) -> str:
    return str(_ask(server, prompt, **more)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("style", ["hermes", "thinking", "harmony"])
def test_a_tool_loop(servers: Callable[[Style], Server], style: Style) -> None:
    server = servers(style)
    first = _ask(server, "What is the weather?", tools=[WEATHER])["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    (generated,) = first["message"]["tool_calls"]
    assert generated["function"]["name"] == "get_weather"
    assert json.loads(generated["function"]["arguments"]) == {"city": "Zürich"}
    messages = [
        {"role": "user", "content": "What is the weather?"},
        first["message"],
        {"role": "tool", "tool_call_id": generated["id"], "content": "sunny"},
        {"role": "system", "content": "A system message in between is no turn to answer."},
    ]
    last = _ask(server, messages, tools=[WEATHER])["choices"][0]
    assert last["message"]["content"] == "It is sunny in Zürich 😀."
    assert last["finish_reason"] == "stop"


def test_two_calls_and_a_forced_one(servers: Callable[[Style], Server]) -> None:
    server = servers("hermes")
    both = _ask(server, "both", tools=[WEATHER])["choices"][0]["message"]["tool_calls"]
    assert [json.loads(c["function"]["arguments"])["city"] for c in both] == ["Bern", "x"]
    forced = _ask(server, "weather", tools=[WEATHER], tool_choice="required")["choices"][0]
    assert json.loads(forced["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Zürich"
    }


def test_rows_of_different_lengths_and_prompts_of_many_chunks(
    servers: Callable[[Style], Server],
) -> None:
    server = servers("hermes")
    prompts = ["recite", "x " * 3000 + "recite", "hi", "y " * 700 + "hi", "sunny", "recite " * 9]
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda p: _text(server, p, max_tokens=3000), prompts))
    assert said == [LONG, LONG, "Hello.", "Hello.", "It is sunny in Zürich 😀.", LONG]


def test_a_lost_engine_goes_on_where_it_was(servers: Callable[[Style], Server]) -> None:
    server = servers("hermes")
    body = {"messages": [{"role": "user", "content": "recite"}], "stream": True}
    said, killed = "", False
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            said += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if said and not killed:
                server.kill_engine()
                killed = True
    assert said == LONG


@pytest.mark.parametrize("style", ["thinking", "harmony"])
def test_thoughts_come_apart(servers: Callable[[Style], Server], style: Style) -> None:
    message = _ask(servers(style), "ponder")["choices"][0]["message"]
    assert message["content"] == "Fine."
    assert message["reasoning_content"].strip() == "Hm, hm, hm, hm."


def test_thoughts_are_switched_off_and_cut_short(servers: Callable[[Style], Server]) -> None:
    server = servers("thinking")
    off = _ask(server, "ponder", chat_template_kwargs={"enable_thinking": False})
    message = off["choices"][0]["message"]
    assert message["content"] == "Fine."
    assert not message.get("reasoning_content")
    message = _ask(server, "ponder", thinking_token_budget=3)["choices"][0]["message"]
    assert message["content"] == "Fine."
    assert 0 < len(message["reasoning_content"].strip()) < len("Hm, hm, hm, hm.")


def test_an_answer_that_was_begun_is_finished(servers: Callable[[Style], Server]) -> None:
    begun = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well: Hel"},
    ]
    answer = _ask(
        servers("hermes"), begun, continue_final_message=True, add_generation_prompt=False
    )
    assert answer["choices"][0]["message"]["content"] == "lo."
