"""What is stored and what is not: chains over a restart, no trace of store: false, a clean end."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from api import tiny_folder
from conftest import Server

SECRET = "xyzzy-never-written-down"
SHORT: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 2}


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _turns(client: openai.OpenAI, previous: str | None, numbers: range) -> str:
    for number in numbers:
        generated = client.responses.create(
            input=f"Turn {number}.", previous_response_id=previous, **SHORT
        )
        assert generated.usage and generated.usage.input_tokens > 10 * number
        if number > numbers.start:
            assert generated.usage.input_tokens_details.cached_tokens > 10 * (number - 1)
        previous = generated.id
    assert previous is not None
    return previous


def test_behaviour_32_chains_of_fifty_turns_survive_a_restart_and_store_false_leaves_no_trace(
    start: Callable[..., Server], tmp_path: Path, default_model: Path
) -> None:
    model = tiny_folder.make(tmp_path / "tiny", default_model)
    store = tmp_path / "store.sqlite"
    options = (str(model), "--store", str(store), "--drain-timeout", "2")

    server = start(*options).wait_ready()
    client = _client(server)
    last = _turns(client, None, range(25))
    unseen = client.responses.create(
        input=SECRET, instructions=SECRET, metadata={"a": SECRET}, store=False, **SHORT
    )
    reported: Any = client.responses.create(input=SECRET, store=False, stream=True, **SHORT)
    assert [event.type for event in reported][-1] == "response.incomplete"
    old = client.responses.create(input="Old.", **SHORT)
    cut = client.responses.create(
        model="tiny",
        input="x",
        background=True,
        max_output_tokens=6000,
        extra_body={"ignore_eos": True},
    )
    _no_trace(store, unseen.id)
    server.stop()

    with sqlite3.connect(store) as sql:
        sql.execute("UPDATE responses SET created = 1 WHERE id = ?", (old.id,))
    server = start(*options).wait_ready()
    client = _client(server)
    last = _turns(client, last, range(25, 50))
    items = list(client.responses.input_items.list(last, limit=100, order="asc"))
    said = [i.content[0].text for i in items if i.role == "user"]  # type: ignore[union-attr]
    assert said == [f"Turn {n}." for n in range(50)]
    after = client.responses.retrieve(cut.id)
    assert after.status == "failed" and after.error
    assert "shutting down" in after.error.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(old.id)
    _no_trace(store, unseen.id)

    drained = client.responses.create(
        model="tiny", input="x", background=True, max_output_tokens=50
    )
    server.stop()
    with sqlite3.connect(store) as sql:
        (body,) = sql.execute("SELECT body FROM responses WHERE id = ?", (drained.id,)).fetchone()
    assert json.loads(body)["status"] in ("completed", "incomplete"), "it gets the drain time"


def _no_trace(store: Path, id: str) -> None:
    files = list(store.parent.glob(store.name + "*"))
    assert store in files
    for file in files:
        kept = file.read_bytes()
        assert SECRET.encode() not in kept
        assert id.encode() not in kept
