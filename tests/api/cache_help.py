"""What the tests of the prefix cache over HTTP share: its report, and prompts of some length."""

from __future__ import annotations

import random
import time
from typing import Any

from conftest import PATIENCE, Server

WORDS = ("water", "wheel", "stone", "grain", "river", "sluice", "flour", "sack", "bread", "rope")


def text(words: int, seed: int) -> str:
    """Words that begin like no other seed's."""
    source = random.Random(seed)
    return f"{seed} " + " ".join(source.choice(WORDS) for _ in range(words))


def report(server: Server, **headers: str) -> dict[str, Any]:
    response = server.http.get("/v1/cache", headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json()["models"][0])


def complete(server: Server, prompt: str, count: int = 4, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def chat(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def run(answer: dict[str, Any]) -> int:
    """Prompt tokens that were really run."""
    return int(answer["usage"]["prompt_tokens"]) - cached(answer)


def wait_written(server: Server, patience: float = PATIENCE) -> None:
    """Until all that is in memory is on disk, too."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        reported = report(server)
        if reported["disk"]["tokens"] >= reported["memory"]["tokens"] > 0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"not written: {reported}")
