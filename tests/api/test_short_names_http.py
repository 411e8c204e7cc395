"""Short names over HTTP: fetched, asked for and listed by Ollama's calls and OpenAI's, and mistyped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_hub
import ollama
import pytest
from api import tiny_folder
from conftest import Server
from models import short_name_shapes as shapes

SOURCE = "mlx-community/Llama-3.2-1B-Instruct-4bit"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("short")
    served = tiny_folder.make(home / "models" / "served", default_model)
    files = fake_hub.files_of(shapes.text_model("llama", home / "tiny"))
    with fake_hub.serving({SOURCE: files}) as hub:
        env = {"MILLRACE_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), **hub.env}
        running = Server(str(served), env=env, only=False).wait_ready()
        yield running
        running.stop()


def test_a_short_name_is_pulled_and_asked_for_as_people_type_it(server: Server) -> None:
    before = server.post("/v1/completions", {"model": "llama3.2:1b", "prompt": "a"})
    assert before.status_code == 404
    assert (
        "It can be fetched (710 MB): millrace pull llama3.2-1b."
        in before.json()["error"]["message"]
    )
    client = ollama.Client(server.url)
    steps = [step.status for step in client.pull("llama3.2:1b", stream=True)]
    assert steps[-1] == "success" and f"Fetching {SOURCE}" in steps
    for name in ("llama3.2:1b", "llama3.2-1b", "Llama-3.2-1B-Instruct-4bit", SOURCE):
        body = {"model": name, "prompt": "a", "max_tokens": 2}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, (name, answer.text)
        assert answer.json()["model"] == SOURCE
    answer = client.generate("llama3.2:1b", "a", raw=True, options={"num_predict": 2})
    assert answer.done
    assert "completion" in (client.show("llama3.2:1b").capabilities or [])
    library = server.http.get("/v1/library").json()
    installed = [s["name"] for s in library["suggested"] if s["installed"]]
    assert installed == ["llama3.2-1b"]


@pytest.mark.parametrize(
    ("typed", "suggested"), [("gpt-os-20b", "gpt-oss-20b"), ("serve", "served")]
)
def test_near_names_are_suggested(server: Server, typed: str, suggested: str) -> None:
    body = {"model": typed, "messages": [{"role": "user", "content": "a"}]}
    for path, more in (
        ("/v1/chat/completions", {}),
        ("/api/chat", {}),
        ("/v1/messages", {"max_tokens": 1}),
    ):
        answer = server.post(path, body | more)
        assert answer.status_code == 404
        assert f"Did you mean {suggested}" in answer.text, answer.text
