"""Errors of the Messages API: Anthropic's shape for every one of them, and the SDK's own types.

Behaviours 1 to 6, 10, 12 and 22 on /v1/messages; a small and busy server with a key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from api import tiny_folder
from api.anthropic_help import HELLO, client_of, events
from conftest import PATIENCE, Server, held, until

KEY = {"x-api-key": "sesame"}
ASK: dict[str, Any] = {"max_tokens": 4, "messages": HELLO}
LONG = ASK | {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("anthropic-errors") / "tiny", default_model)
    limits = ("--max-running", "1", "--max-queue", "1", "--max-body", "200000")
    running = Server(
        str(folder), "--name", "tiny", "--api-key", "sesame", "--keep-alive", "0.2", *limits
    ).wait_ready()
    yield running
    running.stop()


def _error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    return str(body["error"]["message"])


def _bad(server: Server, body: Any, path: str = "/v1/messages") -> str:
    return _error(server.post(path, body, headers=KEY), 400, "invalid_request_error")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
}
TEXT_PAGE = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "x"},
}


def _user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"top_k": "many"}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"n": 2}, "'n'"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "sometimes"),
        ({"output_config": {"effort": "absurd"}}, "effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "xml"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "(?=x)"}}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools.1.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "function"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "always"}}, "always"),
        (
            {
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "tool", "name": "g"},
            },
            "'g'",
        ),
        (_user(IMAGE), "pictures"),
        (_user(PDF), "base64"),
        (_user(TEXT_PAGE | {"citations": {"enabled": True}}), "citations"),
        (
            _user({"type": "tool_result", "tool_use_id": "a", "content": "1"}),
            "messages.0.content.0",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": "Hm."},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]},
                ]
            },
            "tool_use_id",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
                        ],
                    },
                ]
            },
            "pictures",
        ),
        (_user({"type": "server_tool_use", "id": "a"}), "server_tool_use"),
        (_user({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "tool_use"),
        (
            {
                "messages": [
                    *HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "results",
        ),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_config.format",
        ),
    ],
)
def test_a_bad_field_is_named(small: Server, change: dict[str, Any], named: str) -> None:
    body = {k: v for k, v in (ASK | change).items() if v is not None}
    assert named in _bad(small, body)


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'{"messages": "\xff"}', b"[" * 5000])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_invalid_json(small: Server, path: str, body: bytes) -> None:
    response = small.http.post(f"{path}", content=body, headers=KEY)
    _error(response, 400, "invalid_request_error")


def test_an_unknown_model_names_those_there_are(small: Server) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = small.post(path, ASK | {"model": "claude-x"}, headers=KEY)
        assert "tiny" in _error(response, 404, "not_found_error")
    _error(small.http.get("/v1/messages", headers=KEY), 405, "invalid_request_error")
    _error(small.http.get("/v1/messages/x", headers=KEY), 404, "not_found_error")


def test_keys_by_both_headers(small: Server) -> None:
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
        _error(small.post("/v1/messages", ASK, headers=headers), 401, "authentication_error")
    for headers in (KEY, {"authorization": "Bearer sesame"}):
        assert small.post("/v1/messages", ASK, headers=headers).status_code == 200


def test_a_body_over_the_limit(small: Server) -> None:
    body = ASK | {"system": "x" * 300_000}
    _error(small.post("/v1/messages", body, headers=KEY), 413, "request_too_large")


def test_a_prompt_over_the_window_gives_both_numbers(small: Server) -> None:
    body = ASK | {"system": "word " * 9000}
    message = _bad(small, body)
    assert message.startswith("prompt is too long: 90")
    assert f"> {tiny_folder.WINDOW} maximum" in message
    counted = small.post("/v1/messages/count_tokens", body, headers=KEY).json()["input_tokens"]
    assert f" {counted} tokens" in message, "what is too long can still be counted"


def test_the_sdk_raises_its_own_errors(small: Server) -> None:
    client = client_of(small).with_options(api_key="sesame")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="tiny", extra_body={"temperature": 2.0}, **ASK)
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        client.messages.create(model="nope", **ASK)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="tiny", **ASK)


def _begun(server: Server, id: str) -> threading.Thread:
    """A request that runs, in the background, and is known to have its place."""
    headers = KEY | {"x-request-id": id}
    thread = threading.Thread(
        target=server.post, args=("/v1/messages", LONG), kwargs={"headers": headers}
    )
    thread.start()
    assert until(lambda: any(r["id"] == id for r in _status(server)["requests"])), id
    return thread


def _status(server: Server) -> dict[str, Any]:
    return dict(server.http.get("/v1/status", headers=KEY).json()["models"][0])


def test_pings_errors_and_429_of_a_busy_server(small: Server) -> None:
    """One answer runs, one waits with pings, a third is told to come again later."""
    first = _begun(small, "first")
    reported: list[dict[str, Any]] = []
    pings = threading.Semaphore(0)

    def came(name: str) -> None:
        if name == "ping":
            pings.release()

    headers = KEY | {"x-request-id": "second"}
    waiting = threading.Thread(
        target=lambda: reported.extend(events(small, LONG, came, headers=headers))
    )
    with held(_status(small)["engine_pid"]):
        waiting.start()
        for _ in range(2):
            assert pings.acquire(timeout=PATIENCE), "nothing keeps it alive"
        refused = small.post("/v1/messages", ASK, headers=KEY)
    assert _error(refused, 429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    for id in ("second", "first"):
        small.http.delete(f"/v1/requests/{id}", headers=KEY)
    waiting.join(PATIENCE)
    first.join(PATIENCE)
    kinds = [e["type"] for e in reported]
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert kinds.count("ping") >= 2
    assert kinds[-1] == "error", "what ends early says so"
    assert set(reported[-1]["error"]) == {"type", "message"}


def test_an_error_in_a_stream_is_raised_by_the_sdk(small: Server) -> None:
    client = client_of(small).with_options(api_key="sesame")
    with (
        pytest.raises(anthropic.APIStatusError, match="timeout"),
        client.messages.stream(
            model="tiny",
            max_tokens=8000,
            messages=HELLO,  # type: ignore[arg-type]
            extra_body={"timeout": 0.3, "ignore_eos": True},
        ) as stream,
    ):
        stream.until_done()


def test_a_disconnect_frees_the_slot(small: Server) -> None:
    with httpx.stream(
        "POST",
        f"{small.url}/v1/messages",
        json=LONG | {"stream": True},
        headers=KEY,
        timeout=PATIENCE,
    ) as response:
        for line in response.iter_lines():
            if "content_block_delta" in line:
                break
    assert until(lambda: not _status(small)["requests"])
