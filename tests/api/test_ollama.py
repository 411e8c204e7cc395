"""The real ollama client, sync and async, against scripted models: chat, tools, format, think."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import ollama
import pytest
import scripted
from conftest import Server
from scripted import Rule, call, think

from millrace.api.ollama.messages import turns_of
from millrace.api.ollama.schema import OllamaCalledFunction, OllamaMessage, OllamaToolCall

GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
ODD = "one\u2028two\u2029three\u0085four 😀"


def forecast(city: str, days: int = 1) -> str:
    """Tell the weather.

    Args:
      city: Where.
      days: For how long.
    """
    return f"{days} sunny days in {city}"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
      a: The first.
      b: The second.
    """
    return a + b


TOOLS: dict[str, Any] = {"forecast": forecast, "add": add}

RULES = [
    Rule("two things", call("add", a=1, b=2) + "\n" + call("forecast", city="Bonn", days=2)),
    Rule("cut short", call("forecast", city="Llanfairpwllgwyngyll" * 4, days=9)),
    Rule("begin", f"Well then.\n{call('add', a=1, b=1)}"),
    *(Rule(f"\n{n}\n", call("add", a=n, b=1)) for n in range(2, 6)),
    Rule("\n6\n", "It is six."),
    Rule("odd text", ODD),
    Rule("count", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    Rule("again", "Yes, again."),
    Rule("", "Hello there, friend."),
]
THOUGHTS = [
    Rule("weather", think("I should look.", call("forecast", city="Bonn"))),
    Rule("", think("A greeting, then.", "Good day.")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ollama")


@pytest.fixture(scope="module")
def hermes(folder: Path, default_model: Path) -> Iterator[Server]:
    model = scripted.make(folder / "hermes", default_model, RULES)
    running = Server(str(model), "--trust-remote-code").wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def thinker(folder: Path, default_model: Path) -> Iterator[Server]:
    model = scripted.make(folder / "thinker", default_model, THOUGHTS, "thinking")
    running = Server(str(model), "--trust-remote-code").wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def harmony(folder: Path, default_model: Path) -> Iterator[Server]:
    rules = [Rule("again", think("Once more.", "Again.", "harmony"))]
    rules.append(Rule("", think("A greeting.", "Good day.", "harmony")))
    model = scripted.make(folder / "harmony", default_model, rules, "harmony")
    running = Server(str(model), "--trust-remote-code").wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(hermes: Server) -> ollama.Client:
    return ollama.Client(hermes.url)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _lines(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("hermes", _user("hi"), options=GREEDY)
    assert whole.message.role == "assistant"
    assert whole.message.content == "Hello there, friend."
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "hermes")
    assert whole.prompt_eval_count and whole.eval_count
    parts = list(client.chat("hermes", _user("hi"), options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.eval_count) == ("stop", whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert len(parts) > 3


def test_durations_are_measured(hermes: Server) -> None:
    body = {"messages": _user("count"), "stream": False, "options": GREEDY}
    answer = hermes.post("/api/chat", body).json()
    parts = [answer[f"{n}_duration"] for n in ("load", "prompt_eval", "eval")]
    assert all(p > 0 for p in parts)
    assert sum(parts) <= answer["total_duration"] < 60e9
    assert answer["created_at"].endswith("Z")


def test_async(hermes: Server) -> None:
    async def ask() -> tuple[str, str, str]:
        async with ollama.AsyncClient(hermes.url) as client:
            whole = await client.chat("hermes", _user("hi"), options=GREEDY)
            streamed = ""
            async for part in await client.chat("hermes", _user("hi"), stream=True, options=GREEDY):
                streamed += part.message.content or ""
            generated = await client.generate("hermes", "hi", options=GREEDY)
            return whole.message.content or "", streamed, generated.response or ""

    assert len(set(asyncio.run(ask()))) == 1


def test_streaming_is_the_default(hermes: Server) -> None:
    for path, body in (
        ("/api/chat", {"messages": _user("hi")}),
        ("/api/generate", {"prompt": "hi"}),
    ):
        lines = _lines(hermes, path, body)
        assert len(lines) > 2 and lines[-1]["done"]


def test_line_breaks_inside_text_break_no_line(client: ollama.Client) -> None:
    parts = client.chat("hermes", _user("odd text"), stream=True, options=GREEDY)
    assert "".join(p.message.content or "" for p in parts) == ODD


def test_a_tool_call_is_one_object(client: ollama.Client) -> None:
    asked: dict[str, Any] = {"messages": _user("two things"), "tools": [forecast, add]}
    whole = client.chat("hermes", **asked, options=GREEDY)
    calls = [(c.function.name, dict(c.function.arguments)) for c in whole.message.tool_calls or []]
    assert calls == [("add", {"a": 1, "b": 2}), ("forecast", {"city": "Bonn", "days": 2})]
    assert whole.done_reason == "stop"
    streamed, text = [], ""
    for part in client.chat("hermes", **asked, options=GREEDY, stream=True):
        text += part.message.content or ""
        streamed += [
            (c.function.name, dict(c.function.arguments)) for c in part.message.tool_calls or []
        ]
    assert streamed == calls
    assert text.strip() == (whole.message.content or "").strip() == ""


def test_without_tools_a_call_is_text(client: ollama.Client) -> None:
    whole = client.chat("hermes", _user("two things"), options=GREEDY)
    assert whole.message.tool_calls is None
    assert '"name": "add"' in (whole.message.content or "")


def test_a_call_that_was_cut_off_is_none(client: ollama.Client) -> None:
    for stream in (False, True):
        answer = client.chat(
            "hermes",
            _user("cut short"),
            tools=[forecast],
            options=GREEDY | {"num_predict": 20},
            stream=stream,
        )
        parts = list(answer) if stream else [answer]
        assert parts[-1].done_reason == "length"
        assert not any(p.message.tool_calls or p.message.content for p in parts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_six_turns_of_tools(client: ollama.Client, stream: bool) -> None:
    messages: list[Any] = _user("begin")
    said = []
    for _ in range(6):
        answer = client.chat("hermes", messages, tools=[add], options=GREEDY, stream=stream)
        message = _joined(answer) if stream else answer.message
        messages.append(message)
        said.append(message.content)
        for wanted in message.tool_calls or []:
            result = TOOLS[wanted.function.name](**wanted.function.arguments)
            messages.append(
                {"role": "tool", "content": str(result), "tool_name": wanted.function.name}
            )
    assert said[-1] == "It is six."
    assert len(messages) == 12


def _joined(parts: Any) -> ollama.Message:
    content, calls = "", []
    for part in parts:
        content += part.message.content or ""
        calls += part.message.tool_calls or []
    return ollama.Message(role="assistant", content=content, tool_calls=calls or None)


def test_formats(client: ollama.Client) -> None:
    for stream in (False, True):
        answer = client.chat("hermes", _user("hi"), format=SCHEMA, options=GREEDY, stream=stream)
        text = _joined(answer).content if stream else answer.message.content
        jsonschema.validate(json.loads(text or ""), SCHEMA)
    generated = client.generate(
        "hermes", "hi", format="json", options=GREEDY | {"num_predict": 400}
    )
    assert generated.done_reason == "length" or isinstance(
        json.loads(generated.response or ""), dict
    )


def test_thoughts_come_apart(thinker: Server) -> None:
    client = ollama.Client(thinker.url)
    for wish in (None, True, "high"):
        whole = client.chat("thinker", _user("hi"), think=wish, options=GREEDY)
        assert whole.message.thinking == "A greeting, then."
        assert whole.message.content == "Good day."
    thinking = content = ""
    for part in client.chat("thinker", _user("hi"), think=True, options=GREEDY, stream=True):
        assert not (content and part.message.thinking), "a thought after the answer"
        thinking += part.message.thinking or ""
        content += part.message.content or ""
    assert (thinking, content) == ("A greeting, then.", "Good day.")
    off = client.chat("thinker", _user("hi"), think=False, options=GREEDY)
    assert (off.message.thinking, off.message.content) == (None, "Good day.")
    generated = client.generate("thinker", "hi", think=True, options=GREEDY)
    assert (generated.thinking, generated.response) == ("A greeting, then.", "Good day.")
    called = client.chat("thinker", _user("weather"), tools=[forecast], options=GREEDY)
    assert called.message.thinking == "I should look."
    assert called.message.tool_calls
    follow = [*_user("weather"), called.message]
    follow.append(ollama.Message(role="tool", content="sun", tool_name="forecast"))
    assert client.chat("thinker", follow, tools=[forecast], options=GREEDY).message.content


def test_effort_and_context_of_a_harmony_model(harmony: Server) -> None:
    client = ollama.Client(harmony.url)
    first = client.generate("harmony", "hi", think="low", options=GREEDY)
    assert (first.thinking, first.response) == ("A greeting.", "Good day.")
    tokens = {"tokens": first.context, "skip_special_tokens": False}
    assert "Reasoning: low" in harmony.post("/detokenize", tokens).json()["text"]
    second = client.generate("harmony", "again", context=first.context, options=GREEDY)
    assert (second.thinking, second.response) == ("Once more.", "Again.")


def test_results_find_their_calls() -> None:
    calls = [
        OllamaToolCall(OllamaCalledFunction("add", {"a": 1})),
        OllamaToolCall(OllamaCalledFunction("forecast", {}), id="mine"),
        OllamaToolCall(OllamaCalledFunction("add", {"a": 2})),
    ]
    said = turns_of(
        [
            OllamaMessage("assistant", thinking="Hm.", tool_calls=calls),
            OllamaMessage("tool", "sun", tool_name="forecast"),
            OllamaMessage("tool", "1"),
            OllamaMessage("tool", "2", tool_name="add"),
            OllamaMessage("tool", "3"),
        ]
    )
    ids = [c.id for c in said[0].calls]
    assert ids[1] == "mine" and said[0].reasoning == "Hm."
    reported = [(m.call_id, m.name) for m in said[1:]]
    assert reported == [("mine", "forecast"), (ids[0], "add"), (ids[2], "add"), (None, None)]


def test_a_model_that_does_not_think_says_so(client: ollama.Client, hermes: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="does not support thinking") as caught:
        client.chat("hermes", _user("hi"), think=True)
    assert caught.value.status_code == 400
    assert client.chat("hermes", _user("hi"), think=False, options=GREEDY).message.content
    loud = hermes.post("/api/chat", {"messages": _user("hi"), "think": "loud"})
    assert loud.status_code == 400


def test_generate(client: ollama.Client) -> None:
    whole = client.generate("hermes", "hi", options=GREEDY)
    assert whole.response == "Hello there, friend."
    parts = list(client.generate("hermes", "hi", options=GREEDY, stream=True))
    assert "".join(p.response or "" for p in parts) == whole.response
    assert parts[-1].context == whole.context
    raw = client.generate(
        "hermes", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", raw=True
    )
    assert raw.response == whole.response and raw.context is None
    for more in ({"system": "x"}, {"context": [1]}):
        with pytest.raises(ollama.ResponseError, match="raw"):
            client.generate("hermes", "hi", raw=True, **more)  # type: ignore[arg-type]


def test_a_context_is_gone_on_from(client: ollama.Client, hermes: Server) -> None:
    first = client.generate("hermes", "hi", system="Be kind.", options=GREEDY)
    second = client.generate("hermes", "again", context=first.context, options=GREEDY)
    assert second.response == "Yes, again."
    turns = [
        {"role": "system", "content": "Be kind."},
        *_user("hi"),
        {"role": "assistant", "content": first.response},
        *_user("again"),
    ]
    rendered = hermes.post("/tokenize", {"messages": turns}).json()["tokens"]
    assert list(second.context or [])[: len(rendered)] == rendered, "as the template writes it"
    cut = client.generate("hermes", "count", options=GREEDY | {"stop": [", 4"]})
    assert cut.response == "1, 2, 3"
    reported = hermes.post("/detokenize", {"tokens": cut.context}).json()["text"]
    assert reported.endswith("1, 2, 3")
    after = client.generate("hermes", "again", context=cut.context, options=GREEDY)
    assert after.response == "Yes, again."
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("hermes", "again", context=[10**9])


def test_an_answer_that_is_gone_on_with(client: ollama.Client) -> None:
    begun = [*_user("count"), {"role": "assistant", "content": "1, 2, 3,"}]
    answer = client.chat("hermes", begun, options=GREEDY)
    assert (answer.message.content or "").strip() == "4, 5, 6, 7, 8, 9, 10"


def test_logprobs(client: ollama.Client, hermes: Server) -> None:
    whole = client.chat("hermes", _user("hi"), logprobs=True, top_logprobs=2, options=GREEDY)
    assert whole.logprobs
    assert "".join(item.token for item in whole.logprobs) == whole.message.content
    assert all(len(item.top_logprobs or []) == 2 for item in whole.logprobs)
    streamed: list[Any] = []
    for part in client.generate("hermes", "hi", logprobs=True, options=GREEDY, stream=True):
        streamed += part.logprobs or []
    assert [i.token for i in streamed] == [i.token for i in whole.logprobs]
    body = {"messages": _user("hi"), "top_logprobs": 2}
    assert "logprobs" in hermes.post("/api/chat", body).json()["error"]
