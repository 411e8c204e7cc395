"""Conversations made shorter: what comes back stands for what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import scripted
from conftest import Server
from scripted import Rule

SUMMARY = "They are called Ada, and like bees."
RULES = [
    Rule("Summarise our conversation", SUMMARY),
    Rule("Who am I?", "Ada."),
    Rule("", "Noted."),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("compaction")
    model = scripted.make(folder / "model", default_model, RULES, "hermes", window=2048)
    kept = str(folder / "kept.sqlite")
    running = Server(str(model), "--trust-remote-code", "--store", kept).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model="model", input="I am Ada, and like bees.")
    short = client.responses.compact(model="model", previous_response_id=first.id)
    assert short.object == "response.compaction" and short.usage.output_tokens > 0
    said, summary = [item.to_dict() for item in short.output]
    assert said["role"] == "user" and said["content"][0]["text"] == "I am Ada, and like bees."
    assert summary["type"] == "compaction" and "Ada" not in summary["encrypted_content"]
    after = client.responses.create(
        model="model", input=[said, summary, {"role": "user", "content": "Who am I?"}]
    )
    alone = client.responses.create(
        model="model", input=[said, {"role": "user", "content": "Who am I?"}]
    )
    assert after.output_text == alone.output_text == "Ada."
    assert after.usage and alone.usage
    assert after.usage.input_tokens > alone.usage.input_tokens, "the summary is in the prompt"


def test_what_is_too_long_is_cut_before_it_is_summarised(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": f"{n} " + "word " * 400} for n in range(8)]
    short = client.responses.compact(model="model", input=items)  # type: ignore[arg-type]
    assert len(short.output) == 9 and short.usage.input_tokens < 2048


def test_what_cannot_be_compacted_or_read(server: Server) -> None:
    for body, word in (
        ({}, "empty"),
        ({"input": "hi", "previous_response_id": "resp_none"}, "resp_none"),
        ({"input": "hi", "temperature": 0.5}, "temperature"),
        ({"input": [{"type": "compaction", "encrypted_content": "theirs"}]}, "encrypted_content"),
        ({"input": [{"type": "compaction"}]}, "encrypted_content"),
    ):
        response = server.post("/v1/responses/compact", body)
        assert response.status_code == 400 and word in response.json()["error"]["message"], body
    huge = server.post("/v1/responses/compact", {"input": "word " * 4000})
    assert huge.json()["error"]["code"] == "context_length_exceeded"
    assert huge.json()["error"]["param"] == "input"
