"""Responses as agents use them, on scripted models: tool loops, thoughts, groups, freeform, stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import scripted
from api.responses_wire import check_order, create, plain, stream
from conftest import Server
from scripted import Rule

from millrace.text.tokenizer import Tokenizer

TURNS = 6
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+say "hé"\n*** End Patch'
RULES = [
    Rule("walk", scripted.think("Six steps.", scripted.call("step", number=1))),
    *(Rule(f"reached {n}", scripted.call("step", number=n + 1)) for n in range(1, TURNS)),
    Rule(f"reached {TURNS}", scripted.think("That was all.", f"I took {TURNS} steps.")),
    Rule(
        "both", "Two at once." + scripted.call("step", number=8) + scripted.call("step", number=9)
    ),
    Rule("patch it", scripted.call("apply_patch", input=PATCH)),
    Rule("patched", "The patch is in."),
    Rule("read it", scripted.call("mcp__files__read", path="a.txt")),
    Rule("contents", "It says hello."),
    Rule("say hi", scripted.think("Short.", "Hi there!")),
    Rule("", "Well."),
]
STEP: Any = {
    "type": "function",
    "name": "step",
    "description": "Takes a step.",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    },
    "strict": False,
}
FILES: Any = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Tools in the mcp__files namespace.",
    "tools": [
        {
            "type": "function",
            "name": "read",
            "description": "Reads a file.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
    ],
}
APPLY: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use it to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"},
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinking")
    model = scripted.make(folder / "model", default_model, RULES, "thinking")
    server = Server(
        str(model), "--trust-remote-code", "--store", str(folder / "store.sqlite")
    ).wait_ready()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(thinking: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0)


def _walk(client: openai.OpenAI, stateful: bool) -> tuple[int, str]:
    """A tool loop to its end: the calls made, and the last words."""
    items: list[Any] = [{"role": "user", "content": "walk"}]
    previous, calls = None, 0
    while True:
        generated = client.responses.create(
            model="model",
            input=items,
            tools=[STEP],
            store=stateful,
            previous_response_id=previous,
            include=["reasoning.encrypted_content"],
            temperature=0,
        )
        assert generated.status == "completed"
        asked = [i for i in generated.output if i.type == "function_call"]
        if not asked:
            return calls, generated.output_text
        outputs: list[Any] = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"reached {json.loads(call.arguments)['number']}",
            }
            for call in asked
        ]
        calls += len(asked)
        previous = generated.id if stateful else None
        items = (
            outputs if stateful else [*items, *(i.to_dict() for i in generated.output), *outputs]
        )


@pytest.mark.parametrize("stateful", [True, False], ids=["previous_response_id", "stateless"])
def test_a_tool_loop_of_six_turns(client: openai.OpenAI, stateful: bool) -> None:
    assert _walk(client, stateful) == (TURNS, "I took 6 steps.")


def test_behaviour_9_streamed_equals_whole_with_thoughts_and_calls(thinking: Server) -> None:
    for body in (
        {"input": "walk", "tools": [STEP]},
        {"input": "walk", "tools": [STEP], "reasoning": {"summary": "auto"}},
        {"input": "both", "tools": [STEP]},
        {"input": "both"},
        {"input": "patch it", "tools": [APPLY]},
        {"input": "say hi", "max_output_tokens": 3},
        {"input": "walk", "tools": [STEP], "max_output_tokens": 16},
        {"input": "say hi", "enable_thinking": False},
    ):
        asked: Any = {"model": "model", "temperature": 0} | body
        whole = create(thinking, **asked)
        assert plain(check_order(stream(thinking, **asked))) == plain(whole), body


def test_behaviour_30_thoughts_are_reasoning_items(thinking: Server) -> None:
    generated = create(thinking, model="model", input="say hi")
    thought, message = generated["output"]
    assert thought["type"] == "reasoning" and thought["id"].startswith("rs_")
    assert thought["summary"] == []
    assert thought["content"][0]["text"].strip() == "Short."
    assert message["content"][0]["text"] == "Hi there!"
    assert generated["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    reported = create(thinking, model="model", input="say hi", reasoning={"summary": "detailed"})
    assert reported["output"][0]["summary"][0]["text"].strip() == "Short."
    quiet = create(thinking, model="model", input="say hi", reasoning={"effort": "none"})
    assert [i["type"] for i in quiet["output"]] == ["message"]


def test_behaviour_25_two_calls_in_one_answer(thinking: Server) -> None:
    found = stream(thinking, model="model", input="both", tools=[STEP])
    generated = check_order(found)
    calls = [i for i in generated["output"] if i["type"] == "function_call"]
    assert [json.loads(c["arguments"]) for c in calls] == [{"number": 8}, {"number": 9}]
    assert len({c["call_id"] for c in calls}) == len({c["id"] for c in calls}) == 2
    one = create(thinking, model="model", input="both", tools=[STEP], parallel_tool_calls=False)
    assert sum(i["type"] == "function_call" for i in one["output"]) == 1


def test_behaviour_26_and_27_only_offered_tools_are_called(thinking: Server) -> None:
    for more in ({}, {"tools": [STEP], "tool_choice": "none"}):
        generated = create(thinking, model="model", input="both", **more)
        assert {i["type"] for i in generated["output"]} == {"message"}
    named = create(
        thinking,
        model="model",
        input="say hi",
        tools=[STEP, APPLY],
        tool_choice={"type": "function", "name": "step"},
        max_output_tokens=200,
    )
    calls = [i for i in named["output"] if i["type"] == "function_call"]
    assert [c["name"] for c in calls] == ["step"]


def test_grouped_tools_come_back_under_their_group(thinking: Server) -> None:
    generated = create(thinking, model="model", input="read it", tools=[FILES])
    (call,) = generated["output"]
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call",
        "mcp__files",
        "read",
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "contents"}
    for body in (
        {"previous_response_id": generated["id"], "input": [output]},
        {"input": [{"role": "user", "content": "read it"}, call, output]},
    ):
        after = create(thinking, model="model", tools=[FILES], **body)
        assert after["output"][0]["content"][0]["text"] == "It says hello."


def test_freeform_tools_get_their_text(thinking: Server) -> None:
    answer = thinking.post(
        "/v1/responses", {"model": "model", "input": "patch it", "tools": [APPLY]}
    )
    assert answer.headers["x-millrace-ignored"] == "tools.apply_patch.format"
    generated = answer.json()
    (call,) = generated["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}
    after = create(
        thinking, model="model", tools=[APPLY], previous_response_id=generated["id"], input=[output]
    )
    assert after["output"][0]["content"][0]["text"] == "The patch is in."


def test_what_codex_sends(thinking: Server) -> None:
    def text(role: str, words: str) -> dict[str, Any]:
        part = {"type": "input_text", "text": words}
        return {"type": "message", "role": role, "content": [part]}

    body = {
        "model": "model",
        "instructions": "You are a coding agent. " * 50,
        "input": [
            text("developer", "Permissions: all."),
            text("developer", "Rules of the house."),
            text("user", "<environment_context>here</environment_context>"),
            text("user", "say hi"),
        ],
        "tools": [STEP, FILES, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"x-codex-installation-id": "1"},
        "stream": True,
    }
    with httpx.stream(
        "POST",
        f"{thinking.url}/v1/responses",
        json=body,
        headers={"accept": "text/event-stream", "x-codex-turn-state": "t", "originator": "codex"},
        timeout=120,
    ) as answer:
        assert answer.headers["x-millrace-ignored"] == "tools.web_search"
        text_of = answer.read().decode()
    assert "[DONE]" not in text_of
    generated = check_order(stream(thinking, **{k: v for k, v in body.items() if k != "stream"}))
    thought, message = generated["output"]
    assert thought["encrypted_content"] and thought["summary"][0]["text"].strip() == "Short."
    assert message["content"][0]["text"] == "Hi there!"
    assert generated["status"] == "completed"
    assert thinking.http.get(f"/v1/responses/{generated['id']}").status_code == 404


COUNT = ", ".join(map(str, range(1, 11)))


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    rules = [
        Rule("Count", scripted.think("Up to 10, 6 included.", COUNT, "harmony")),
        Rule("reached", "Done."),
        Rule(
            "walk", scripted.think("A step.", scripted.call("step", "harmony", number=1), "harmony")
        ),
    ]
    folder = tmp_path_factory.mktemp("harmony")
    model = scripted.make(folder / "model", default_model, rules, "harmony")
    server = Server(str(model), "--trust-remote-code", "--store", "none").wait_ready()
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        ({"stop": ["6"]}, "1, 2, 3, 4, 5, "),
        ({"stop": "6"}, "1, 2, 3, 4, 5, "),
        ({"stop": ["5, 6"]}, "1, 2, 3, 4, "),
        ({}, COUNT),
    ],
)
def test_stop_rows_6_1_and_6_2_on_harmony(
    harmony: Server, stops: dict[str, Any], text: str
) -> None:
    body = {"input": "Count 1-10", "max_output_tokens": 200, "temperature": 0} | stops
    whole = create(harmony, **body)
    found = stream(harmony, **body)
    assert whole["status"] == "completed"
    assert found[-1]["type"] == "response.completed"
    assert plain(check_order(found)) == plain(whole)
    thought, message = whole["output"]
    assert "6 included" in thought["content"][0]["text"], "stops do not fire inside a thought"
    assert message["content"][0]["text"] == text
    assert "<|" not in json.dumps(whole)


def test_stop_row_6_by_token_id_on_harmony(harmony: Server, default_model: Path) -> None:
    (five,) = Tokenizer(default_model).encode("5")
    body = {"input": "Count 1-10", "max_output_tokens": 200, "stop_token_ids": [five]}
    generated = create(harmony, **body)
    assert (generated["status"], generated["matched_stop"]) == ("completed", five)
    assert generated["output"][-1]["content"][0]["text"].rstrip() == "1, 2, 3, 4,"


def test_harmony_calls_and_effort(harmony: Server) -> None:
    body = {"input": "walk", "tools": [STEP], "reasoning": {"effort": "high", "summary": "auto"}}
    answer = harmony.post("/v1/responses", body)
    assert "x-millrace-ignored" not in answer.headers
    thought, call = answer.json()["output"]
    assert thought["summary"][0]["text"] == "A step."
    assert json.loads(call["arguments"]) == {"number": 1}
    items = [
        {"role": "user", "content": "walk"},
        thought,
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "reached 1"},
    ]
    after = create(harmony, input=items, tools=[STEP])
    assert after["output"][-1]["content"][0]["text"] == "Done."


def test_a_server_that_stores_nothing_says_so(harmony: Server) -> None:
    generated = create(harmony, input="Count")
    refused = harmony.post("/v1/responses", {"input": "x", "previous_response_id": generated["id"]})
    assert refused.status_code == 400 and "--store none" in refused.json()["error"]["message"]
    for more in ({"background": True}, {"conversation": "conv_1"}):
        assert harmony.post("/v1/responses", {"input": "x"} | more).status_code == 400
    assert harmony.post("/v1/conversations", {}).status_code == 400
    assert harmony.http.get(f"/v1/responses/{generated['id']}").status_code == 404
    asked = harmony.post("/v1/responses", {"input": "Count", "store": True})
    assert asked.headers["x-millrace-ignored"] == "store"
