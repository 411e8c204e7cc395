"""Pressing Send on /docs: every example of the description is sent, as it stands, to a server that has a
model of each kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from api import tiny_folder
from conftest import Server
from models import encoder_folders

NAMES = {"MODEL": "text", "EMBEDDER": "vectors", "RANKER": "scores"}
STREAMS = ("text/event-stream", "application/x-ndjson")
ENDLESS = {"/v1/status/stream", "/v1/logs/stream"}
UNKNOWN_ID = "{id}"
"""What is asked for by an id: the reader has to bring one."""
ONLY_WHERE_THERE_IS_ONE = {
    "/abort_request": "a request under way",
    "/api/delete": "a model that may go",
    "/api/pull": "a server that serves other models than the named ones",
    "/v1/load_lora_adapter": "an adapter",
    "/v1/unload_lora_adapter": "an adapter",
}
NOT_DONE_HERE = {"/api/push", "/api/copy", "/api/create", "/api/blobs/{digest}", "/v1/hub/search"}
"""Ollama's, which are answered with a 501; and what a server with --only refuses."""


class Example(NamedTuple):
    path: str
    method: str
    body: Any
    query: dict[str, str]

    @property
    def unloads(self) -> bool:
        return "unload" in self.path


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("examples")
    folders = {
        "text": tiny_folder.make(home / "text", default_model, max_position_embeddings=512),
        "vectors": encoder_folders.encoder(home / "vectors"),
        "scores": encoder_folders.classifier(home / "scores"),
    }
    named = [f"{name}={folder}" for name, folder in folders.items()]
    running = Server(
        *named, "--max-tokens", "16", "--store", str(home / "responses.sqlite")
    ).wait_ready()
    yield running
    running.stop()


def _examples(document: dict[str, Any]) -> Iterator[Example]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            left_out = ENDLESS | NOT_DONE_HERE | set(ONLY_WHERE_THERE_IS_ONE)
            if UNKNOWN_ID in path or path in left_out:
                continue
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            body = content.get("example", {}) if content else None
            said = json.dumps(body)
            for sign, name in NAMES.items():
                said = said.replace(f'"{sign}"', f'"{name}"')
            asked = [p["name"] for p in operation["parameters"] if p["in"] == "query"]
            query = {"model": "text"} if "model" in asked else {}
            yield Example(path.replace("{name}", "text"), method, json.loads(said), query)


def test_every_example_works_as_it_stands(everything: Server) -> None:
    document = everything.http.get("/openapi.json").json()
    examples = sorted(_examples(document), key=lambda example: example.unloads)
    wrong = []
    page = {"sec-fetch-site": "same-origin"}  # as the page at /docs sends them
    for example in examples:
        answer = everything.http.request(
            example.method, example.path, json=example.body, params=example.query, headers=page
        )
        streamed = answer.headers.get("content-type", "").startswith(STREAMS)
        failed = streamed and re.search(r'"error":\s*[{"]', answer.text)
        if answer.status_code >= 400 or failed:
            wrong.append((example.method, example.path, answer.status_code, answer.text[:300]))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(examples) > 50


def test_the_models_of_each_kind_can_be_told_apart(everything: Server) -> None:
    cards = everything.http.get("/v1/models").json()["data"]
    kinds = {card["id"]: card["output_modalities"] for card in cards}
    assert kinds == {"text": ["text"], "vectors": ["embeddings"], "scores": ["scores"]}


def test_the_page_fills_in_every_sign_of_the_examples(everything: Server) -> None:
    signs = set(re.findall(r'"model":\s*"([A-Z]{3,})"', everything.http.get("/openapi.json").text))
    page = everything.http.get("/docs").text
    script = everything.http.get(re.findall(r'src="([^"]+docs\.js)"', page)[0]).text
    assert signs == set(NAMES)
    for sign in NAMES:
        assert f"{sign}:" in script
