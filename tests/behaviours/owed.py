"""What the tests of the behaviours share: two servers, and the little that is asked beside answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import scripted
from api import tiny_folder
from api.endpoint import Endpoint, Said
from api.endpoints import ALL, TALKS
from conftest import PATIENCE, Server, until
from prometheus_client.parser import text_string_to_metric_families
from scripted import Rule, call, think

every = pytest.mark.parametrize("endpoint", ALL, ids=str)
every_talk = pytest.mark.parametrize("endpoint", TALKS, ids=str)

LONG: dict[str, Any] = {"max_tokens": 6000, "temperature": 0}
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
WINDOW = tiny_folder.WINDOW
KEY = "a-key-of-the-mill"
RUNNING, QUEUE, CHUNK = 4, 2, 64
ENDS = {"config": 0, "generation_config": 5, "text_config": 6, "tokenizer": 2}
"""A token that ends answers, by where the model says so."""

HELLO = "Hello ☃ 你好 😀, friend."
THOUGHT = "A greeting, then."
PONDERED = "word " * 60
JSON = '{"sky": "blue", "warm": true}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}, "long": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
RULES = [
    Rule("two calls", call("look", at="sky", long=True) + "\n" + call("look", at="sea")),
    Rule("mixed", think("I must look.", f"{HELLO}\n" + call("look", at="sky", long=False))),
    Rule("not offered", call("rm", path="/")),
    Rule("ponder", think(PONDERED, "Done.")),
    Rule("as JSON", think("In a form.", JSON)),
    Rule("Count", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    Rule("And now", "Still here."),
    Rule("", think(THOUGHT, HELLO)),
]


class Mill(NamedTuple):
    """The tiny model's server, whose requests need a key."""

    server: Server
    client: httpx.Client
    model: Path

    def status(self) -> dict[str, Any]:
        return dict(self.client.get("/v1/status").json()["models"][0])

    @property
    def engine(self) -> int:
        return int(self.status()["engine_pid"])

    @property
    def requests(self) -> list[dict[str, Any]]:
        return list(self.status()["requests"])

    def only(self) -> dict[str, Any]:
        """The one request that is under way."""
        assert until(lambda: len(self.requests) == 1), self.requests
        return self.requests[0]

    def metric(self, sample: str) -> float:
        text = self.client.get("/metrics").text
        return sum(
            s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name == sample
        )

    @property
    def prefilled(self) -> int:
        """Prompt tokens that were really run, since the start."""
        return int(self.metric("millrace_prefilled_tokens_total"))

    @property
    def generated(self) -> int:
        """Tokens of answers, since the start."""
        return int(self.metric("millrace_generated_tokens_total"))

    def idle(self) -> bool:
        return until(lambda: not self.requests)

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A request of a client that reads nothing, and may leave whenever it likes."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: mill\r\nAuthorization: Bearer {KEY}\r\n"
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", self.server.port))
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return client


def both(client: httpx.Client, endpoint: Endpoint, say: str, **wishes: Any) -> Said:
    """The answer, which is the same streamed and whole."""
    body = endpoint.body(say, **wishes)
    whole, streamed = endpoint.whole(client, body), endpoint.stream(client, body)
    assert streamed == whole
    return streamed


def post(client: httpx.Client, endpoint: Endpoint, body: dict[str, Any]) -> httpx.Response:
    return client.post(endpoint.path, json={"stream": False} | body)


def serve_tiny(folder: Path, tokenizer_of: Path) -> Iterator[Mill]:
    model = tiny_folder.make(folder / "tiny", tokenizer_of)
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = ENDS["config"]
    config["text_config"] = {"eos_token_id": [ENDS["text_config"]]}
    (model / "config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": ENDS["generation_config"]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    server = Server(
        str(model), "--alias", "mill", "--admin-key", KEY, "--keep-alive", "0.05",
        "--max-running", str(RUNNING), "--max-queue", str(QUEUE), "--prefill-chunk", str(CHUNK),
        "--store", str(folder / "store.sqlite"),
    ).wait_ready()  # fmt: skip
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE) as client:
        yield Mill(server, client, model)
    server.stop()


def serve_scripted(folder: Path, tokenizer_of: Path) -> Iterator[httpx.Client]:
    generated = scripted.make(folder / "scripted", tokenizer_of, RULES, "thinking")
    store = str(folder / "store.sqlite")
    server = Server(str(generated), "--trust-remote-code", "--store", store).wait_ready()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client
    server.stop()
