"""Chat in full: every documented field of OpenAI's API is honoured, or refused or left out by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import scripted
from conftest import Server
from scripted import Rule

from millrace.text.conversation import Conversation
from millrace.text.dialect import Dialect
from millrace.text.tokenizer import Tokenizer

PATCH = 'line "one"\n\tzwei \\ ünï 🙂 end'
RULES = [
    Rule("weather", scripted.call("get_weather", city="Paris")),
    Rule("both", scripted.call("get_weather", city="Rome") + "\n" + scripted.call("get_time")),
    Rule("patch", scripted.call("apply", input=PATCH)),
    Rule("wrong", '<tool_call>\n{"name": "apply", "arguments": {"text": "x"}}\n</tool_call>'),
    Rule("sunny", "It is sunny."),
    Rule("done", "Applied."),
    Rule("", "Hello."),
]
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
APPLY = {"type": "custom", "custom": {"name": "apply", "description": "Applies a patch."}}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = scripted.make(tmp_path_factory.mktemp("chat") / "agent", default_model, RULES)
    running = Server(str(folder), "--name", "agent", "--trust-remote-code").wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(agent: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0)


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _ask(server: Server, text: str, **more: Any) -> httpx.Response:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    body = {"messages": messages, "temperature": 0, "max_tokens": 80}
    return server.post("/v1/chat/completions", body | more)


def _choice(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def _streamed(server: Server, text: str, **more: Any) -> dict[str, Any]:
    """A streamed choice, put together as clients do."""
    response = _ask(server, text, stream=True, **more)
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    message: dict[str, Any] = {"content": ""}
    finishes = []
    for event in map(json.loads, lines):
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            known = message.setdefault("tool_calls", [])
            if call["index"] == len(known):
                known.append({k: v for k, v in call.items() if k != "index"})
                continue
            for kind, field in (("function", "arguments"), ("custom", "input")):
                if kind in call:
                    known[call["index"]][kind][field] += call[kind][field]
        if part := delta.get("function_call"):
            call = message.setdefault("function_call", {"name": part.get("name"), "arguments": ""})
            call["arguments"] += part["arguments"]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finishes) == 1
    return {"message": message, "finish_reason": finishes[0]}


def test_functions_of_old_are_called_in_the_old_way(agent: Server) -> None:
    for asked in (
        {"functions": [WEATHER]},
        {"functions": [WEATHER, TIME], "function_call": "auto"},
        {"functions": [WEATHER, TIME], "function_call": {"name": "get_weather"}},
    ):
        whole = _choice(_ask(agent, "weather?", **asked))
        call = whole["message"]["function_call"]
        assert call["name"] == "get_weather"
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        assert "tool_calls" not in whole["message"]
        assert whole["message"]["content"] is None
        assert whole["finish_reason"] == "function_call"
        streamed = _streamed(agent, "weather?", **asked)
        assert streamed["message"]["function_call"] == call
        assert streamed["finish_reason"] == "function_call"


def test_the_old_way_knows_one_call_and_none(agent: Server) -> None:
    both = _choice(_ask(agent, "both?", functions=[WEATHER, TIME]))
    assert json.loads(both["message"]["function_call"]["arguments"]) == {"city": "Rome"}
    none = _choice(_ask(agent, "weather?", functions=[WEATHER], function_call="none"))
    assert "function_call" not in none["message"]
    assert none["finish_reason"] == "stop"


def test_a_conversation_in_the_old_way_goes_on(agent: Server) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        },
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    old = _ask(agent, "", messages=messages, functions=[WEATHER])
    assert _choice(old)["message"]["content"] == "It is sunny."
    call = {"id": "c1", "type": "function", "function": messages[1]["function_call"]}
    messages[1:] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    new = _ask(agent, "", messages=messages, tools=[_tool(WEATHER)])
    assert old.json()["usage"]["prompt_tokens"] == new.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"functions": [WEATHER], "tools": [_tool(TIME)]}, "functions"),
        ({"functions": [WEATHER], "tool_choice": "auto"}, "functions"),
        ({"functions": [WEATHER], "function_call": {"name": "nope"}}, "tool_choice"),
        ({"function_call": {"name": "nope"}}, "tool_choice"),
        ({"functions": [{}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].name"),
        ({"tools": [_tool(WEATHER), _tool(WEATHER)]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "nope"}}}, "tool_choice"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, "modalities"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"verbosity": "low"}, "verbosity"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    agent: Server, more: dict[str, Any], param: str
) -> None:
    refused = _ask(agent, "hi", **more)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param, refused.text


@pytest.mark.parametrize(
    "part, named",
    [
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "no videos"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_id": "x"}}, "file"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(
    agent: Server, part: dict[str, Any], named: str
) -> None:
    refused = _ask(agent, "", messages=[{"role": "user", "content": [part]}])
    assert refused.status_code == 400
    assert named in refused.json()["error"]["message"]


def test_what_only_labels_or_advises_is_accepted(agent: Server) -> None:
    answer = _ask(
        agent,
        "hi",
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prediction={"type": "content", "content": "Hello."},
        modalities=["text"],
        audio=None,
        verbosity="medium",
        response_format={"type": "text"},
        stream_options={"include_obfuscation": False},
        logit_bias={},
        tools=[],
        tool_choice="auto",
        functions=None,
    )
    choice = _choice(answer)
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert "x-millrace-ignored" not in answer.headers


def test_what_is_left_out_is_named(agent: Server) -> None:
    answer = _ask(
        agent,
        "hi",
        web_search_options={"search_context_size": "low"},
        tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, _tool(TIME)],
        reasoning_effort="high",
        enable_thinking=True,
        chat_template_kwargs={"strange": 1},
        **{"new_field": 1, "schlüssel\n": 2},
    )
    assert _choice(answer)["message"]["content"] == "Hello."
    assert set(answer.headers["x-millrace-ignored"].split(", ")) == {
        "web_search_options",
        "tools.web_search",
        "tools.mcp",
        "reasoning_effort",
        "enable_thinking",
        "chat_template_kwargs.strange",
        "new_field",
        "schl\\xfcssel\\n",
    }
    many = _ask(agent, "hi", **{f"field_number_{i}": i for i in range(1000)})
    assert len(many.headers["x-millrace-ignored"]) < 2100


def test_parts_and_names_make_one_text(agent: Server) -> None:
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": "sunny"}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "name": "ann", "content": parts},
    ]
    assert _choice(_ask(agent, "", messages=messages))["message"]["content"] == "It is sunny."


def test_only_allowed_tools_are_called(agent: Server) -> None:
    tools = [_tool(WEATHER), _tool(TIME)]

    def allow(mode: str, *names: str) -> dict[str, Any]:
        listed = [{"type": "function", "function": {"name": n}} for n in names]
        allowed = {"mode": mode, "tools": listed}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    for choice in (allow("auto", "get_weather"), allow("required", "get_weather", "get_time")):
        whole = _choice(_ask(agent, "weather?", tools=tools, tool_choice=choice))
        assert whole["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert whole["finish_reason"] == "tool_calls"
    other = _choice(_ask(agent, "weather?", tools=tools, tool_choice=allow("auto", "get_time")))
    assert "tool_calls" not in other["message"], "a call of what was not offered is no call"
    unknown = _ask(agent, "weather?", tools=tools, tool_choice=allow("auto", "nope"))
    assert unknown.status_code == 400


def test_a_custom_tool_takes_free_text(agent: Server) -> None:
    for asked in ({}, {"tool_choice": {"type": "custom", "custom": {"name": "apply"}}}):
        whole = _choice(_ask(agent, "patch", tools=[APPLY, _tool(TIME)], **asked))
        (call,) = whole["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "apply", "input": PATCH})
        assert whole["finish_reason"] == "tool_calls"
        (piece,) = _streamed(agent, "patch", tools=[APPLY, _tool(TIME)], **asked)["message"][
            "tool_calls"
        ]
        assert piece["custom"] == call["custom"]
    messages = [
        {"role": "user", "content": "patch"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    assert _choice(_ask(agent, "", messages=messages, tools=[APPLY]))["message"]["content"] == (
        "Applied."
    )


def test_a_custom_tool_called_amiss_is_told_as_it_is(agent: Server) -> None:
    whole = _choice(_ask(agent, "wrong", tools=[APPLY]))["message"]["tool_calls"][0]
    streamed = _streamed(agent, "wrong", tools=[APPLY])["message"]["tool_calls"][0]
    assert whole["custom"] == streamed["custom"]
    assert json.loads(whole["custom"]["input"]) == {"text": "x"}


def test_a_custom_tools_regex_is_enforced_and_its_grammar_named(agent: Server) -> None:
    grammar = {"syntax": "regex", "definition": "[0-9]{3}"}
    tool = {"type": "custom", "custom": {"name": "dial", "format": _grammar(grammar)}}
    named = {"type": "custom", "custom": {"name": "dial"}}
    call = _choice(_ask(agent, "hi", tools=[tool], tool_choice=named))["message"]["tool_calls"][0]
    assert len(call["custom"]["input"]) == 3 and call["custom"]["input"].isdecimal()
    tool["custom"]["format"] = _grammar({"syntax": "lark", "definition": 'start: "a"'})  # type: ignore[index]
    assert "tools.dial.format" in _ask(agent, "hi", tools=[tool]).headers["x-millrace-ignored"]


def _grammar(grammar: dict[str, str]) -> dict[str, Any]:
    return {"type": "grammar", "grammar": grammar}


def test_the_sdk_reads_every_kind(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    said = [{"role": "user", "content": "patch"}]
    message = create(model="agent", messages=said, tools=[APPLY], temperature=0).choices[0].message
    assert message.tool_calls[0].custom.input == PATCH
    said = [{"role": "user", "content": "weather?"}]
    old = create(model="agent", messages=said, functions=[WEATHER], temperature=0).choices[0]
    assert old.message.function_call.name == "get_weather"
    assert old.finish_reason == "function_call"


@pytest.mark.parametrize(
    ("template", "thinking", "effort", "ignored"),
    [
        ("{{ messages }}", None, None, []),
        ("{{ messages }}", True, None, ["thinking"]),
        ("{{ messages }}", False, None, []),
        ("{{ messages }}", None, "high", ["effort"]),
        ("{{ messages }}", None, "none", []),
        ("{{ messages }}<think></think>", False, None, ["thinking"]),
        ("{{ messages }}<think></think>", None, "none", ["effort"]),
        ("{{ messages }}<think></think>", True, None, []),
        ("{{ messages }}<think></think>{{ enable_thinking }}", False, "low", ["effort"]),
        ("{{ messages }}<think></think>{{ enable_thinking }}", None, "none", []),
        ("{{ messages }}<think></think>{{ reasoning_effort }}", None, "low", []),
        ("{{ messages }}<think></think>/no_think", False, None, []),
    ],
)
def test_what_a_model_cannot_be_steered_by(
    tmp_path: Path,
    default_model: Path,
    template: str,
    thinking: bool | None,
    effort: str | None,
    ignored: list[str],
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((default_model / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    dialect = Dialect(Tokenizer(tmp_path))
    chat = Conversation([{"role": "user", "content": "x"}], thinking=thinking, effort=effort)
    assert dialect.ignored(chat) == ignored
    assert dialect.unknown_arguments(["messages", "verbosity"]) == ["verbosity"]
