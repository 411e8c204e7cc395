"""Prompts that go back to a huge conversation: refused or shortened after a bounded read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from api import huge_store, tiny_folder
from api.huge_store import message
from api.responses_wire import SHORT, serve
from conftest import Server

from millrace.api.responses import reader
from millrace.api.responses.history import before
from millrace.api.responses.items import read_items
from millrace.api.responses.measure import Room, StoredMeasure, measure
from millrace.api.responses.schema import ResponsesRequest
from millrace.api.responses.store import Store, conversation_object
from millrace.errors import ContextLengthExceeded
from millrace.serving.model import ServedModel

NOBODY = "0" * 16
HUGE, OLD, RULED = (f"conv_{name}_{NOBODY}" for name in ("huge", "old", "ruled"))
COUNT = 60_000
WINDOW = tiny_folder.WINDOW


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("history")
    file = folder / "store.sqlite"
    huge_store.fill(file, HUGE, COUNT)
    huge_store.fill(file, OLD, COUNT, measured=False)
    yield from serve(folder, default_model)


def ask(server: Server, **more: Any) -> httpx.Response:
    return server.post("/v1/responses", SHORT | {"input": "And now?", "store": False} | more)


@pytest.mark.parametrize("conversation", [HUGE, OLD])
def test_what_cannot_fit_is_refused(server: Server, conversation: str) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = server.post(path, SHORT | {"input": "And?", "conversation": conversation})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert "at least" in error["message"]


@pytest.mark.parametrize("conversation", [HUGE, OLD])
def test_what_cannot_fit_is_shortened_where_that_is_asked_for(
    server: Server, conversation: str
) -> None:
    answer = ask(server, conversation=conversation, truncation="auto")
    assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]["input_tokens"]
    assert WINDOW // 2 < used < WINDOW
    newest = server.http.get(f"/v1/conversations/{conversation}/items?limit=2").json()
    assert newest["data"][1]["content"][0]["text"] == "And now?", "it was added"


def test_a_template_that_leaves_turns_out_is_no_reason_to_refuse(
    tmp_path: Path, default_model: Path
) -> None:
    folder = tiny_folder.make(tmp_path / "tiny", default_model)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages[-2:] %}{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = tmp_path / "store.sqlite"
    huge_store.fill(file, HUGE, 2 * WINDOW)
    server = Server(str(folder), "--store", str(file)).wait_ready()
    try:
        answer = ask(server, conversation=HUGE)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["input_tokens"] < 30
        long = "word " * 2 * WINDOW
        refused = server.post("/v1/responses", SHORT | {"input": long, "conversation": HUGE})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    finally:
        server.stop()


def test_compaction_reads_no_more_than_may_fit(server: Server) -> None:
    short = server.post("/v1/responses/compact", {"model": "tiny", "conversation": HUGE})
    assert short.status_code == 200, short.text
    output = short.json()["output"]
    assert output[-1]["type"] == "compaction"
    said = [i["id"] for i in output[:-1] if i["id"].startswith("m") and "_" not in i["id"]]
    assert said[-1] == f"m{COUNT - 1}" and WINDOW <= len(said) < 2 * WINDOW


class _Scene:
    """A store and a model of a window, and what was decoded."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store(path)
        self.decoded = 0
        real = reader.decode

        def decode(body: bytes) -> dict[str, Any]:
            self.decoded += 1
            return real(body)

        monkeypatch.setattr(reader, "decode", decode)
        tokenizer = SimpleNamespace(fewest_of_ascii=lambda n: n // 20)
        dialect = SimpleNamespace(keeps_turns=True)
        model = SimpleNamespace(window=1000, tokenizer=tokenizer, dialect=dialect)
        self.room = Room(cast(ServedModel, model))

    def before(self, conversation: str, *, shorten: bool) -> list[dict[str, Any]]:
        self.decoded = 0
        wire = ResponsesRequest(conversation=conversation)
        given = read_items("And now?")
        reading = before(self.store, wire, "", self.room, given, shorten=shorten)
        return asyncio.run(asyncio.wait_for(reading, 60))


def test_little_is_decoded_of_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "store.sqlite"
    huge_store.fill(file, HUGE, 10_000)
    huge_store.fill(file, OLD, 10_000, measured=False)
    scene = _Scene(file, monkeypatch)
    with pytest.raises(ContextLengthExceeded, match="at least 10001 tokens"):
        scene.before(HUGE, shorten=False)
    assert scene.decoded == 1, "the conversation's own row"
    with pytest.raises(ContextLengthExceeded, match="at least 1025 tokens"):
        scene.before(OLD, shorten=False)
    assert scene.decoded == 1 + 4 * 256, "four batches, which have too many turns"
    kept = scene.before(HUGE, shorten=True)
    assert scene.decoded == 1 + 4 * 256
    assert [i["id"] for i in kept] == [f"m{n}" for n in range(10_000 - 1024, 10_000)]
    scene.store.close()


def test_instructions_stay_however_old_and_results_without_calls_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _Scene(tmp_path / "store.sqlite", monkeypatch)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "found"}
    items = [
        message("rule", "Be brief.", "developer"),
        *(message(f"a{n}", "hi") for n in range(300)),
        *read_items([call, result]),
        *(message(f"b{n}", "hi") for n in range(1023)),
    ]
    talk = conversation_object(RULED, 1, {})
    asyncio.run(scene.store.add_conversation(talk, items))
    kept = scene.before(RULED, shorten=True)
    assert [i["id"] for i in kept] == ["rule", *(f"b{n}" for n in range(1023))]
    assert scene.decoded == 1 + 4 * 256 + 1, "the rule is found by an index"
    asyncio.run(scene.store.extend_conversation(RULED, [message("more", "x" * 21_000)]))
    kept = scene.before(RULED, shorten=True)
    assert kept[0]["id"] == "rule" and kept[-1]["id"] == "more"
    rules = [message(f"r{n}", "Be brief.", "developer") for n in range(1100)]
    asyncio.run(scene.store.extend_conversation(RULED, rules))
    with pytest.raises(ContextLengthExceeded):
        scene.before(RULED, shorten=True)
    scene.store.close()


def test_the_measure_is_a_lower_bound() -> None:
    items = read_items(
        [
            {"role": "user", "content": " ab c\n"},
            {"role": "user", "content": " \n "},
            {"role": "user", "content": "äöü x"},
            {"role": "assistant", "content": "<think>long thoughts</think> yes"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ]
    )
    assert measure(items) == StoredMeasure(turns=3, text=3 + 1 + 4)
    assert StoredMeasure(1, 2).minus(StoredMeasure(3, 1)) == StoredMeasure(0, 1)
