"""A Hugging Face hub on 127.0.0.1: it lists models and serves the files of one that can be fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def listed(
    id: str,
    kind: str | None,
    weights: dict[str, int] | None,
    *,
    bits: int | None = None,
    tags: tuple[str, ...] = ("mlx", "safetensors"),
    downloads: int = 10,
    **more: Any,
) -> dict[str, Any]:
    """A model as the hub lists it."""
    config: dict[str, Any] = {"model_type": kind} if kind else {}
    if bits:
        config["quantization_config"] = {"bits": bits}
    found = {"id": id, "config": config, "downloads": downloads, "tags": list(tags)}
    found |= {"gated": False, "pipeline_tag": "text-generation"}
    if weights is not None:
        found["safetensors"] = {"parameters": weights, "total": sum(weights.values())}
    return found | more


MODELS = [
    listed("mlx-community/Qwen3-0.6B-4bit", "qwen3", {"BF16": 1_000_000, "U32": 74_000_000}, bits=4,
           downloads=900),
    listed("mlx-community/Qwen3-235B-4bit", "qwen3_moe", {"U32": 29_000_000_000}, bits=4,
           downloads=800),
    listed("acme/Qwen3-odd", "nobody_knows", {"BF16": 1_000_000}, downloads=700),
    listed("acme/Qwen3-unsized", "qwen3", None, downloads=600, gated="manual"),
    listed("Qwen/Qwen3-0.6B", "qwen3", {"BF16": 600_000_000}, tags=("safetensors",), downloads=500),
]  # fmt: skip


class FakeHub:
    """Answers searches, and has the files of the folders in `models` for download."""

    def __init__(self, models: dict[str, Path] | None = None) -> None:
        self.models = models or {}
        self.asked: list[str] = []
        self.held = threading.Event()
        """While set, requests wait until it is released."""
        self.instead: tuple[int, str] | None = None
        """A status and a body with which searches are answered in place of models."""
        self._go = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hold(self) -> None:
        self._go.clear()
        self.held.set()

    def release(self) -> None:
        self.held.clear()
        self._go.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        self.asked.append(http.path)
        if self.held.is_set():
            self._go.wait(60)
        parts = urlsplit(http.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        if path == "/api/models":
            status, body = self.instead or (200, json.dumps(self._found(query)))
            self._send(http, status, body.encode(), {"Content-Type": "application/json"})
            return
        for id, folder in self.models.items():
            if path.startswith(f"/api/models/{id}"):
                self._json(http, _about(id, folder, path))
                return
            if path.startswith(f"/{id}/resolve/"):
                self._file(http, folder / path.split("/", 5)[-1])
                return
        self._json(http, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _found(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        words = query.get("search", [""])[0].lower()
        tags = query.get("filter", [])
        most = int(query.get("limit", ["100"])[0])
        own = [listed(id, "qwen3", {"BF16": 100_000}, bits=4, downloads=5) for id in self.models]
        return [
            m
            for m in [*MODELS, *own]
            if words in m["id"].lower() and all(tag in m["tags"] for tag in tags)
        ][:most]

    def _json(
        self,
        http: BaseHTTPRequestHandler,
        value: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(http, status, json.dumps(value).encode(), kind | (headers or {}))

    def _send(
        self, http: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        http.send_response(status)
        for name, text in headers.items():
            http.send_header(name, text)
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        if http.command != "HEAD":
            http.wfile.write(body)

    def _file(self, http: BaseHTTPRequestHandler, path: Path) -> None:
        data = path.read_bytes()
        start = int(http.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = data[start:]
        http.send_response(206 if start else 200)
        if start:
            http.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        http.send_header("Content-Length", str(len(rest)))
        http.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        http.send_header("X-Repo-Commit", COMMIT)
        http.end_headers()
        if http.command == "HEAD":
            return
        http.wfile.write(rest)


def _about(id: str, folder: Path, path: str) -> Any:
    files = sorted(f for f in folder.iterdir() if f.is_file())
    siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in files]
    if "/tree/" in path:
        return [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"} for f in files
        ]
    return {"id": id, "modelId": id, "sha": COMMIT, "siblings": siblings, "private": False}
