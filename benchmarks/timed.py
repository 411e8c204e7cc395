"""One streamed request to an OpenAI-compatible server: when its first text came, and what it used."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import httpx
from common import Child, wait_healthy

PATIENCE = 600.0


@dataclass(frozen=True)
class Timed:
    seconds: float
    """From sending to the first text; to the end, where there was none."""
    prompt_tokens: int
    cached_tokens: int | None
    """None where the server does not say."""
    text: str

    @property
    def run_tokens(self) -> int | None:
        """Prompt tokens that were run."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens


def complete(server: Child, prompt: str, max_tokens: int = 1, **more: Any) -> Timed:
    return ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more})


def ask(server: Child, path: str, body: dict[str, Any]) -> Timed:
    body = {
        "model": "default_model",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    first: float | None = None
    usage: dict[str, Any] = {}
    text = ""
    begin = time.perf_counter()
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE) as http,
        http.stream("POST", server.url + path, json=body) as response,
    ):
        if response.status_code != 200:
            raise server.failed(f"HTTP {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise server.failed(str(event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                first = now if piece and first is None else first
                text += piece
    details = usage.get("prompt_tokens_details") or {}
    return Timed(
        (first or time.perf_counter()) - begin,
        usage["prompt_tokens"],
        details.get("cached_tokens"),
        text,
    )


def get(server: Child, path: str) -> Any:
    answer = httpx.get(server.url + path, timeout=60, trust_env=False)
    if answer.status_code != 200:
        raise server.failed(f"{path}: HTTP {answer.status_code}")
    return answer.json()


def wait_written(server: Child, patience: float = 60.0) -> None:
    """Until what millrace's cache holds in memory is on disk, too."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        reported = get(server, "/v1/cache")["models"][0]
        if reported["disk"]["tokens"] >= reported["memory"]["tokens"]:
            return
        time.sleep(0.2)
    raise server.failed("the cache was not written to disk.")


def kill_engine(server: Child) -> None:
    """Kill -9 of millrace's engine; returns when another one is up."""
    status = get(server, "/v1/status")["models"][0]
    os.kill(status["engine_pid"], signal.SIGKILL)
    while get(server, "/v1/status")["models"][0]["restarts"] == status["restarts"]:
        time.sleep(0.02)
    wait_healthy(server)
    while get(server, "/health")["status"] != "ready":
        time.sleep(0.05)
