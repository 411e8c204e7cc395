"""Fetching from a hub, played by a small server here: files, progress, refusals, then no network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}" + bytes(3_000_000),
    "model.py": b"raise SystemExit('never fetched')",
    "pytorch_model.bin": bytes(10),
}
ASK = """
import sys
from millrace.errors import ModelError
from millrace.models.resolve import resolve
def say(stage, done, total):
    print("progress", stage, done, total)
try:
    found = resolve(sys.argv[1], progress=say)
    print("found", sorted(p.name for p in found.path.iterdir()))
except ModelError as error:
    print("error", error.message)
"""


class Hub(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/org/gated"):
            self.reply(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/name/tree/"):
            files = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in FILES.items()
            ]
            self.reply(200, json.dumps(files).encode(), body, {})
        elif path.startswith("/api/models/org/name"):
            about = {"id": "org/name", "sha": COMMIT, "siblings": []}
            self.reply(200, json.dumps(about).encode(), body, {})
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            content = FILES[path.rsplit("/", 1)[1]]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.reply(200, content, body, {"ETag": etag, "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

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


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def ask(name: str, endpoint: str, tmp_path: Path) -> list[str]:
    places = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}
    places |= {"MILLRACE_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, name],
        env=os.environ | places | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def test_what_is_needed_is_fetched_once(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    *progress, found = ask("org/name", endpoint, tmp_path)
    assert found == "found ['config.json', 'model.safetensors', 'tokenizer.json']"
    assert progress[0] == "progress Fetching org/name 0 None"
    wanted = sum(len(FILES[n]) for n in ("config.json", "model.safetensors", "tokenizer.json"))
    assert progress[-1] == f"progress Fetching org/name {wanted} {wanted}"
    asked.clear()
    assert ask("org/name", endpoint, tmp_path) == [found]
    assert asked == []


def test_refusals_say_what_to_do(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    assert "no public model 'org/none'" in ask("org/none", endpoint, tmp_path)[-1]
    assert "accept it" in ask("org/gated", endpoint, tmp_path)[-1]


def test_no_network_says_what_to_do(tmp_path: Path) -> None:
    (*_, error) = ask("org/name", "http://127.0.0.1:9", tmp_path)
    assert error.startswith("error The model 'org/name' is not on this machine, or not whole")
