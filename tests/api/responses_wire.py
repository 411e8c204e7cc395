"""Reading Responses off the wire as they are, and checking them against the openai SDK's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
from api import tiny_folder
from conftest import Server
from openai.types.responses import Response, ResponseStreamEvent

_EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
SHORT: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}


def serve(folder: Path, tokenizer_of: Path) -> Iterator[Server]:
    """A tiny model that stores its responses in a folder."""
    model = tiny_folder.make(folder / "tiny", tokenizer_of)
    server = Server(str(model), "--store", str(folder / "store.sqlite")).wait_ready()
    yield server
    server.stop()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def create(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    response = dict(answer.json())
    Response.model_validate(response)
    return response


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    """All events of a streamed answer, each of which must be as documented."""
    with httpx.stream(
        "POST", f"{server.url}/v1/responses", json=body | {"stream": True}, timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        return events(answer)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    names: list[str] = []
    for line in answer.iter_lines():
        if line.startswith("event: "):
            names.append(line[7:])
        elif line.startswith("data: "):
            found.append(json.loads(line[6:]))
            _EVENT.validate_python(found[-1])
        else:
            assert not line or line.startswith(":"), line
    assert names == [e["type"] for e in found]
    return found


def numbers(found: list[dict[str, Any]]) -> list[int]:
    return [e["sequence_number"] for e in found]


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request must share: all but ids, times and the cache's luck."""
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    kept["usage"] = {k: v for k, v in kept["usage"].items() if k != "input_tokens_details"}
    kept["output"] = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in kept["output"]
    ]
    return kept


def check_order(found: list[dict[str, Any]]) -> dict[str, Any]:
    """That the events tell one answer in the documented order; returns its response."""
    kinds = [e["type"].removeprefix("response.") for e in found]
    assert numbers(found) == list(range(len(found)))
    assert kinds[0] == "created" and "in_progress" in kinds[1:3]
    assert kinds[-1] in ("completed", "incomplete", "failed")
    assert sum(k in ("completed", "incomplete", "failed") for k in kinds) == 1
    last: dict[str, Any] = found[-1]["response"]
    for index, item in enumerate(last["output"]):
        mine = [e for e in found if e.get("output_index") == index]
        assert sum("output_item" in e["type"] for e in mine) == 2
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[-1]["type"] == "response.output_item.done"
        assert mine[-1]["item"] == item
        assert {e["item_id"] for e in mine[1:-1]} <= {item["id"]}
        pieces = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
        assert pieces == _said(item)
    return last


def _said(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    if item["type"] == "custom_tool_call":
        return str(item["input"])
    parts = item["summary"] or item["content"] if item["type"] == "reasoning" else item["content"]
    return "".join(p["text"] for p in parts)
