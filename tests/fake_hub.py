"""A hub on this machine: the part of Hugging Face's protocol by which models are fetched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40
GATED = "org/gated"


class _Handler(BaseHTTPRequestHandler):
    models: Mapping[str, Mapping[str, bytes]]
    asked: list[str]
    open: threading.Event

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        self.open.wait(60)
        words = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(words[:2])
        files = self.models.get(name)
        if name == GATED:
            self.reply(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/{name}/resolve/{COMMIT}/"):
            content = files[path.rsplit("/", 1)[1]]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.reply(200, content, body, {"ETag": etag, "X-Repo-Commit": COMMIT})
        elif "tree" in words:
            listed = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in files.items()
            ]
            self.reply(200, json.dumps(listed).encode(), body, {})
        else:
            about = {"id": name, "sha": COMMIT, "siblings": []}
            self.reply(200, json.dumps(about).encode(), body, {})

    def reply(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


class Hub:
    """Its address, and what it was asked for."""

    def __init__(self, url: str, asked: list[str], opened: threading.Event) -> None:
        self.url = url
        self.asked = asked
        self.open = opened
        """While it is clear, requests wait for their answers."""

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to fetch from it."""
        direct = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", **direct}


@contextlib.contextmanager
def serving(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub that has these models, each with its files."""
    asked: list[str] = []
    opened = threading.Event()
    opened.set()
    own = type("Own", (_Handler,), {"models": models, "asked": asked, "open": opened})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_address[1]}", asked, opened)
    finally:
        opened.set()
        server.shutdown()
        server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    """A model folder as a hub has it."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
