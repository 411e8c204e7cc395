"""What the tests of the Messages API share: clients, scripted servers, and answers to compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import scripted
from conftest import Server

HELLO = [{"role": "user", "content": "hello"}]


def client_of(server: Server, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, **more)


def serve_script(
    folder: Path,
    tokenizer_of: Path,
    rules: list[scripted.Rule],
    style: scripted.Style,
    *args: str,
) -> Iterator[Server]:
    generated = scripted.make(folder / "scripted", tokenizer_of, rules, style)
    running = Server(str(generated), "--trust-remote-code", *args).wait_ready()
    yield running
    running.stop()


def events(
    server: Server,
    body: dict[str, Any],
    came: Callable[[str], object] = lambda name: None,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire; each is named by its type, told as it comes."""
    found: list[dict[str, Any]] = []
    url = f"{server.url}/v1/messages"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120, **kwargs) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append(json.loads(line[6:]))
                assert found[-1]["type"] == name
                came(name)
    return found


def prompt_tokens(usage: Any) -> int:
    """All tokens of a prompt, read, written or neither."""
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


def plain(message: anthropic.types.Message) -> dict[str, Any]:
    """A message without what may differ when it is asked for again: ids, and the cache's part."""
    reported: Any = message.to_dict()
    for block in reported["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return {k: reported[k] for k in ("content", "stop_reason", "stop_sequence", "model")} | {
        "prompt": prompt_tokens(message.usage),
        "made": message.usage.output_tokens,
        "thought": reported["usage"]["output_tokens_details"],
    }
