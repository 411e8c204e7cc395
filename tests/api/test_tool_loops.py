"""A loop of six turns with tools ends in the same state, whatever protocol it went through.

Each turn the scripted model calls tools with nested, unicode and numeric arguments; the test runs
them as a client would, and the conversation that the model sees must be the same to the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import scripted
from api.endpoint import Call, Endpoint, Said, called
from api.endpoints import CHAT, MESSAGES, OLLAMA, RESPONSES
from conftest import Server
from scripted import Rule, Style

SYSTEM = "You survey – carefully."
BEGIN = "Begin the survey."
LAST = "All six are done: ✓ naïve, 世界."
NUMBERS = {"big": 12345678901234567890, "small": 1e-7, "less": -0.5, "whole": 3.0, "none": 0}
ARGUMENTS: list[dict[str, Any]] = [
    {"where": {"city": "Zürich", "at": [47.3769, -8.5417]}, "depth": 1},
    {"names": ["你好", "ça va ☃", 'a "quote" \\ back\nline\t'], "flags": {"deep": [True, None]}},
    NUMBERS,
    {},
    {"where": {"city": "Bern", "rooms": [{"n": 1, "tags": ["a", {"b": {"c": []}}]}]}},
    {"note": "</tool_call> and <think> and 😀 are only text"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name.capitalize()}s a place.",
        "parameters": {"type": "object", "properties": {"where": {"type": "object"}}},
    }
    for name in ("survey", "measure")
]


class Step(NamedTuple):
    calls: list[Call]
    text: str = ""
    thought: str = ""

    def written(self, style: Style) -> str:
        calls = "\n".join(
            scripted.call(c.name, style, **json.loads(c.arguments)) for c in self.calls
        )
        if style == "harmony" and self.text:
            head = "<|channel|>commentary<|message|>"
            said = f"{head}{self.text}<|end|><|start|>assistant{calls}"
        else:
            said = f"{self.text}\n{calls}" if self.text else calls
        return scripted.think(self.thought, said, style) if self.thought else said


def _steps(style: Style) -> list[Step]:
    steps = [Step([called("survey", arguments)]) for arguments in ARGUMENTS]
    # Harmony ends its turn with the first call.
    if style != "harmony":
        steps[4] = Step([*steps[4].calls, called("measure", {"where": {"city": "Rom"}})])
    steps[2] = steps[2]._replace(text="Now the numbers – all of them.")
    steps[0] = steps[0]._replace(thought="Where to begin? In Zürich.")
    steps[2] = steps[2]._replace(thought="Numbers next.")
    steps[5] = steps[5]._replace(thought="One last thing:\n\n- a note.")
    return steps


def _rules(style: Style) -> list[Rule]:
    begin, *others = _steps(style)
    return [
        *(Rule(f"step {n} done", s.written(style)) for n, s in enumerate(others, 1)),
        Rule("step 6 done", LAST),
        Rule(BEGIN, begin.written(style)),
    ]


@dataclass
class Record:
    """How a loop went, and what the model saw of it."""

    calls: list[Call] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    """The length of each turn's prompt."""
    generated: list[int] = field(default_factory=list)

    def add(self, said: Said) -> None:
        self.calls += said.calls
        self.texts.append(said.text)
        self.thoughts.append(said.thought)
        self.finishes.append(said.finish)
        self.prompts.append(said.prompt)
        self.generated.append(said.generated)


class Way(NamedTuple):
    """A protocol, and how it is used."""

    endpoint: Endpoint
    streamed: bool
    chained: bool = False
    """The server keeps the conversation."""

    def body(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.endpoint.body("", tools=TOOLS, temperature=0)
        if self.endpoint in (CHAT, OLLAMA):
            history = [{"role": "system", "content": SYSTEM}, *history]
        else:
            body["system" if self.endpoint is MESSAGES else "instructions"] = SYSTEM
        if self.endpoint is RESPONSES:
            body |= {"store": self.chained, "include": ["reasoning.encrypted_content"]}
        return body | {self.endpoint.history: history}


WAYS = [
    *(Way(e, streamed) for e in (CHAT, MESSAGES, OLLAMA) for streamed in (False, True)),
    *(Way(RESPONSES, s, chained) for s in (False, True) for chained in (False, True)),
]


def _name(way: Way) -> str:
    kept = "-kept" if way.chained else ""
    return f"{way.endpoint}{kept}-{'streamed' if way.streamed else 'whole'}"


def _walk(client: httpx.Client, way: Way) -> tuple[Record, dict[str, Any]]:
    """To the loop's end; returns the record, and the last turn's request."""
    endpoint, record = way.endpoint, Record()
    history: list[dict[str, Any]] = [{"role": "user", "content": BEGIN}]
    body = way.body(history)
    for step in range(1, 9):
        ask = endpoint.stream if way.streamed else endpoint.whole
        said = ask(client, body)
        record.add(said)
        if not said.calls:
            break
        outputs = [_run(step, call) for call in said.calls]
        results = endpoint.results(said, outputs)
        if way.chained:
            reported = said.raw[-1]["response"] if way.streamed else said.raw
            body = way.body(results) | {"previous_response_id": reported["id"]}
        else:
            history = [*history, *said.turn, *results]
            body = way.body(history)
    return record, body


def _run(step: int, call: Call) -> str:
    return f"step {step} done – {call.name} gave ☃ for {call.arguments}"


@pytest.fixture(scope="module")
def clients(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path
) -> Iterator[Callable[[Style], httpx.Client]]:
    running: dict[Style, tuple[Server, httpx.Client]] = {}

    def of(style: Style) -> httpx.Client:
        if style not in running:
            folder = tmp_path_factory.mktemp("loops")
            generated = scripted.make(folder / style, default_model, _rules(style), style)
            store = str(folder / "store.sqlite")
            server = Server(str(generated), "--trust-remote-code", "--store", store).wait_ready()
            running[style] = server, httpx.Client(base_url=server.url, timeout=60)
        return running[style][1]

    yield of
    for server, client in running.values():
        client.close()
        server.stop()


@pytest.fixture(scope="module", params=["thinking", "harmony"])
def style(request: pytest.FixtureRequest) -> Style:
    chosen: Style = request.param
    return chosen


@pytest.fixture(scope="module")
def reference(clients: Callable[[Style], httpx.Client], style: Style) -> Record:
    return _walk(clients(style), WAYS[0])[0]


def test_the_loop_is_as_the_script_has_it(reference: Record, style: Style) -> None:
    steps = _steps(style)
    assert reference.calls == [call for step in steps for call in step.calls]
    assert reference.texts == [*(step.text for step in steps), LAST]
    assert reference.thoughts == [*(step.thought for step in steps), ""]
    assert reference.finishes == ["calls"] * 6 + ["stop"]
    assert sorted(set(reference.prompts)) == reference.prompts, "every turn adds to the prompt"


@pytest.mark.parametrize("way", WAYS, ids=_name)
def test_every_way_ends_in_the_same_state(
    clients: Callable[[Style], httpx.Client], style: Style, reference: Record, way: Way
) -> None:
    record, body = _walk(clients(style), way)
    assert record == reference
    assert _counted(clients(style), way, body) == reference.prompts[-1]


def _counted(client: httpx.Client, way: Way, body: dict[str, Any]) -> int:
    """The last turn's prompt, where the protocol has a way to ask for its length."""
    if way.endpoint is OLLAMA:
        return int(OLLAMA.whole(client, body).prompt)
    if way.endpoint is CHAT:
        asked = {k: body[k] for k in ("messages", "tools")}
        tokens = client.post("/tokenize", json=asked).raise_for_status().json()
        return len(tokens["tokens"])
    path = {MESSAGES: "/v1/messages/count_tokens", RESPONSES: "/v1/responses/input_tokens"}
    response = client.post(path[way.endpoint], json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["input_tokens"])


def test_the_rendered_prompts_are_the_same_text(
    clients: Callable[[Style], httpx.Client], style: Style
) -> None:
    """What chat renders for the last turn holds each argument and each result, once."""
    client = clients(style)
    _, body = _walk(client, WAYS[0])
    asked = {k: body[k] for k in ("messages", "tools")}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    shown = {"tokens": tokens, "skip_special_tokens": False}
    text = client.post("/detokenize", json=shown).json()["text"]
    for step in _steps(style):
        for call in step.calls:
            assert text.count(f"gave ☃ for {call.arguments}") == 1
        assert not step.text or text.count(step.text) == 1
    assert text.count("step 6 done") == 1
