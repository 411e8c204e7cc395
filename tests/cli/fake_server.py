"""An OpenAI-compatible server that plays a script, for tests of commands that talk to one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


GOOD: list[Any] = [
    ": keep-alive",
    chunk(role="assistant", content=""),
    chunk(reasoning_content="hmm"),
    chunk(content="Bon"),
    chunk(content="jour é"),
    chunk(finish="stop"),
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}},
]


class Fake(ThreadingHTTPServer):
    """An OpenAI-compatible server that plays a list of events and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.script: list[Any] = GOOD
        self.refusal: tuple[int, bytes] | None = None
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: list[dict[str, Any]] = [{"id": "fake"}]
        self.capabilities: dict[str, list[str]] | None = None
        """By name, of a server like ours; others know nothing of it."""


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        bodies = {"/health": {"status": "ready"}, "/v1/models": {"data": self.server.models}}
        body = bodies.get(self.path)
        self._send(404 if body is None else 200, json.dumps(body or {}).encode())

    def do_POST(self) -> None:
        if self.path == "/api/show":
            self._show(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            return
        self.server.keys.append(self.headers.get("authorization"))
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.refusal:
            self._send(*self.server.refusal)
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for event in [*self.server.script, "data: [DONE]"]:
                text = event if isinstance(event, str) else f"data: {json.dumps(event)}"
                whole = (text + "\n\n").encode()
                for cut in (whole[:9], whole[9:]):
                    self.wfile.write(cut)
                    self.wfile.flush()

    def _show(self, asked: dict[str, Any]) -> None:
        known = (self.server.capabilities or {}).get(asked["model"])
        body = {"error": "no such thing"} if known is None else {"capabilities": known}
        self._send(404 if known is None else 200, json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def playing() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
