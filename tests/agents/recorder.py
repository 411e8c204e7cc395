"""A loopback proxy between an agent and the server: passes everything on, and keeps it.

What an agent sends and gets is otherwise invisible; here a test can look for refused requests and
read the usage that each protocol reports.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx

_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


class Tokens(NamedTuple):
    prompt: int
    cached: int
    """How many of them were not run again."""
    generated: int


@dataclass
class Exchange:
    method: str
    path: str
    sent: bytes
    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    got: bytearray = field(default_factory=bytearray)
    done: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.sent))

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = bytes(self.got).decode().splitlines()
        data = [line[5:].strip() for line in lines if line.startswith("data:")]
        return [json.loads(d) for d in data if d != "[DONE]"]

    @property
    def trouble(self) -> bool:
        """It was refused, or failed on its way."""
        return self.status >= 400 or any(
            e.get("error") or e.get("type") in ("response.failed", "response.incomplete")
            for e in self.events
        )

    @property
    def tokens(self) -> Tokens:
        """The usage at the end of the stream, in whichever protocol it was."""
        total: dict[str, Any] = {}
        for event in self.events:
            nested = event.get("message") or event.get("response") or {}
            total |= event.get("usage") or nested.get("usage") or {}
        if "prompt_tokens" in total:
            details = total.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            return Tokens(total["prompt_tokens"], cached, total["completion_tokens"])
        if "input_tokens_details" in total:
            cached = total["input_tokens_details"]["cached_tokens"]
            return Tokens(total["input_tokens"], cached, total["output_tokens"])
        read = total.get("cache_read_input_tokens") or 0
        written = total.get("cache_creation_input_tokens") or 0
        return Tokens(total["input_tokens"] + read + written, read, total["output_tokens"])

    def __str__(self) -> str:
        return f"{self.method} {self.path} -> {self.status} {bytes(self.got[:600]).decode()}"


class Recorder:
    def __init__(self, target: str) -> None:
        self.target = target
        self.exchanges: list[Exchange] = []
        self._client = httpx.Client(timeout=120)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def generations(self) -> list[Exchange]:
        """The requests that offered tools: the agent's own turns, not its titles and probes."""
        posts = [e for e in self.exchanges if e.method == "POST" and e.sent]
        return [e for e in posts if e.body.get("tools") and not e.path.endswith("count_tokens")]

    @property
    def troubles(self) -> list[str]:
        return [str(e) for e in self.exchanges if e.trouble]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                recorder._pass_on(self)

            do_GET = do_HEAD = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def _pass_on(self, http: BaseHTTPRequestHandler) -> None:
        sent = http.rfile.read(int(http.headers.get("content-length") or 0))
        exchange = Exchange(http.command, http.path, sent)
        self.exchanges.append(exchange)
        headers = {k: v for k, v in http.headers.items() if k.lower() not in _OWN_HEADERS}
        url = self.target + http.path
        http.close_connection = True  # the end of the answer is the end of the connection
        try:
            with self._client.stream(http.command, url, headers=headers, content=sent) as answer:
                exchange.status, exchange.headers = answer.status_code, answer.headers
                http.send_response(answer.status_code)
                for key, value in answer.headers.items():
                    if key.lower() not in _OWN_HEADERS:
                        http.send_header(key, value)
                http.send_header("connection", "close")
                http.end_headers()
                for piece in answer.iter_raw():
                    exchange.got += piece
                    http.wfile.write(piece)
                    http.wfile.flush()
            exchange.done = True
        except (httpx.HTTPError, OSError):
            pass  # either side went away: `done` stays false
