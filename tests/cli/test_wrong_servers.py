"""Commands that meet another program where they look for a server say so in a sentence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from millrace.cli.app import app
from millrace.errors import MillraceError

PAGE = b"<!DOCTYPE html><html><body><h1>Error</h1></body></html>"
COMMANDS = [["ps"], ["ps", "--json"], ["stop", "some"], ["chat"]]


@contextlib.contextmanager
def _answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            self.rfile.read(length)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("status", "body"),
    [(404, PAGE), (200, PAGE), (500, b""), (200, b"{}"), (200, b"[1]"), (404, b'{"error": "no"}')],
    ids=["page 404", "page 200", "empty 500", "object", "list", "odd error"],
)
def test_another_program_is_named_in_a_sentence(
    command: list[str], status: int, body: bytes
) -> None:
    with _answering(status, body) as url:
        done = CliRunner().invoke(app, [*command, "--url", url], input="")
    assert isinstance(done.exception, MillraceError), done.exception
    said = done.exception.message
    assert "<" not in said and len(said) < 300
    assert url in said or "no" in said
