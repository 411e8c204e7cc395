"""Looking on: the status and the log as streams, the last requests, and whose pages may change anything."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, held, until

from millrace.api.admin import log_lines
from millrace.api.admin.log_lines import LogLines
from millrace.api.origins import is_foreign

BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("watching") / "tiny", default_model)
    running = Server(
        str(folder), "--name", "tiny", "--admin-key", "sk-watch", "--keep-alive", "0.2",
        "--cors-origin", "https://friend.example",
    )  # fmt: skip
    running.http.headers["authorization"] = "Bearer sk-watch"
    yield running.wait_ready()
    assert running.stop() == 0


def _events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_a_stream_of_the_status_begins_with_the_last_ten_minutes(tiny: Server) -> None:
    with tiny.http.stream("GET", "/v1/status/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = _events(response)
        name, history = next(events)
        assert name == "history"
        lengths = {len(column) for column in history["samples"].values()}
        assert len(lengths) == 1 and lengths.pop() <= 600
        _, first = next(events)
        before = first["models"][0]["totals"]["generated_tokens"]
        tiny.post("/v1/completions", BODY)
        seen: list[Any] = []
        for _, value in events:
            seen.append(value)
            counted = value["models"][0]["totals"]["generated_tokens"]
            # A snapshot may be of the middle of the answer.
            if len(seen) > 30 or (len(seen) > 1 and counted >= before + 3):
                break
    assert set(seen[0]["models"][0]) == set(tiny.status())
    assert seen[-1]["models"][0]["totals"]["generated_tokens"] == before + 3
    assert sum(s["sample"]["generated"] for s in seen) > 0
    times = [s["sample"]["time"] for s in seen]
    assert times == sorted(set(times))


def test_every_listener_gets_the_same_snapshot(tiny: Server) -> None:
    before = tiny.status()["totals"]["generated_tokens"]
    all_listen = Barrier(4, lambda: tiny.post("/v1/completions", BODY))

    def first_after() -> str:
        """What is told first once all listen and something has changed."""
        with tiny.http.stream("GET", "/v1/status/stream") as response:
            events = _events(response)
            assert next(events)[0] == "history"
            next(events)
            all_listen.wait(PATIENCE)
            told = (v for _, v in events)
            return next(
                json.dumps(v)
                for v in told
                if v["models"][0]["totals"]["generated_tokens"] == before + 3
            )

    with ThreadPoolExecutor(4) as pool:
        heard = [f.result() for f in [pool.submit(first_after) for _ in range(4)]]
    assert len(set(heard)) == 1


def test_too_many_listeners_are_refused_and_those_who_leave_make_room(tiny: Server) -> None:
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(tiny.http.stream("GET", "/v1/logs/stream"))
        refused = stack.enter_context(tiny.http.stream("GET", "/v1/logs/stream"))
        assert refused.status_code == 429 and refused.headers["retry-after"]

    def is_let_in() -> bool:
        with tiny.http.stream("GET", "/v1/logs/stream") as again:
            return again.status_code == 200

    assert until(is_let_in), "nobody who left made room"


def test_requests_that_ended_are_told_newest_first(tiny: Server) -> None:
    for number in range(3):
        tiny.post("/v1/completions", BODY, headers={"x-request-id": f"told-{number}"})
    tiny.post("/v1/completions", BODY | {"timeout": 1e-6}, headers={"x-request-id": "told-late"})
    found = tiny.http.get("/v1/requests", params={"limit": 4}).json()
    assert [r["id"] for r in found["ended"]] == ["told-late", "told-2", "told-1", "told-0"]
    assert [r["outcome"] for r in found["ended"]] == ["timeout", "ok", "ok", "ok"]
    one = found["ended"][1]
    assert (one["model"], one["endpoint"], one["generated_tokens"]) == (
        "tiny",
        "/v1/completions",
        3,
    )
    assert one["seconds"] >= one["ttft_seconds"] > 0
    assert found["running"] == []


def test_running_requests_are_listed_with_their_model_and_can_be_cancelled(tiny: Server) -> None:
    long = BODY | {"max_tokens": 4000, "stream": True}
    with tiny.http.stream(
        "POST", "/v1/completions", json=long, headers={"x-request-id": "runs"}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        with held(tiny.engine):
            (running,) = tiny.http.get("/v1/requests").json()["running"]
            assert (running["id"], running["model"]) == ("runs", "tiny")
            assert tiny.http.delete("/v1/requests/runs").status_code == 200
        assert "cancelled" in "".join(lines)
    ended = "/v1/requests?limit=1"
    assert until(lambda: tiny.http.get(ended).json()["ended"][0]["outcome"] == "cancelled")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/requests?limit=-1",
        "/v1/requests?limit=501",
        "/v1/requests?limit=x",
        "/v1/logs/stream?level=loud",
        "/v1/logs/stream?tail=100000000000000000000000",
    ],
)
def test_what_is_asked_for_wrongly_is_refused_by_name(tiny: Server, path: str) -> None:
    refused = tiny.http.get(path)
    assert refused.status_code == 400
    assert path.partition("?")[2].partition("=")[0] in refused.json()["error"]["message"]


def test_the_log_comes_with_its_last_lines_first(tiny: Server) -> None:
    tiny.post("/v1/completions", BODY, headers={"x-request-id": "logged-before"})
    with tiny.http.stream("GET", "/v1/logs/stream?tail=1") as response:
        events = _events(response)
        name, line = next(events)
        assert (name, line["id"], line["level"]) == ("line", "logged-before", "info")
        tiny.post("/v1/completions", BODY, headers={"x-request-id": "logged-after"})
        assert next(events)[1]["id"] == "logged-after"
    with tiny.http.stream("GET", "/v1/logs/stream?level=error") as response:
        assert next(response.iter_raw())[:1] == b":", "of nothing, the stream tells that it lives"


@pytest.mark.parametrize("path", ["/v1/status/stream", "/v1/requests", "/v1/logs/stream"])
def test_looking_on_needs_a_key(tiny: Server, path: str) -> None:
    assert httpx.get(tiny.url + path, timeout=PATIENCE).status_code == 401


CHANGES = [
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/models/tiny/unload", {}),
    ("POST", "/v1/messages", {}),
    ("POST", "/api/pull", {"model": "x"}),
    ("DELETE", "/v1/cache", None),
    ("DELETE", "/v1/requests/x", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_what_changes_something_is_refused_to_a_foreign_page(
    tiny: Server, method: str, path: str, body: Any, origin: str
) -> None:
    refused = tiny.http.request(method, path, json=body, headers={"origin": origin})
    assert refused.status_code == 403
    assert "--cors-origin" in json.dumps(refused.json()["error"])


def test_own_pages_friendly_ones_and_programs_may(tiny: Server) -> None:
    for origin in (tiny.url, "https://friend.example", "vscode-webview://abc", "tauri://localhost"):
        assert tiny.post("/v1/completions", BODY, headers={"origin": origin}).status_code == 200
    looked = tiny.http.get("/v1/status", headers={"origin": "https://evil.example"})
    assert looked.status_code == 200, "to look is not to change; the browser keeps it from the page"


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://localhost:8000", "localhost:8000", False),
        ("http://LOCALHOST:8000", "localhost:8000", False),
        ("http://localhost:8000", "127.0.0.1:8000", True),
        ("https://llm.example", "llm.example", False),
        ("https://llm.example", "llm.example:443", False),
        ("https://llm.example:444", "llm.example", True),
        ("http://[::1]:8000", "[::1]:8000", False),
        ("http://a.example:99999999", "a.example", True),
        ("http://[", "a.example", True),
        ("null", "a.example", True),
        ("NULL", "a.example", True),
        ("http://", "", True),
        ("http://null", "a.example", True),
        ("file://", "a.example", True),
        ("file:///home/page.html", "a.example", True),
        ("FILE://a.example", "a.example", True),
        ("data:text/html", "a.example", True),
        ("blob:http://a.example/x", "a.example", True),
        ("blob://a.example", "a.example", True),
        ("app://", "a.example", False),
        ("chrome-extension://abcdefghij", "a.example", False),
        ("app://x/../../", "a.example", True),
        ("http://a.example@evil.example", "a.example", True),
        ("http://evil.example@a.example", "a.example", True),
        ("http://a.example:80@evil.example", "a.example", True),
        ("http://a.example:80:80", "a.example", True),
        ("http://a.example:", "a.example", False),
        ("http://a.example:080", "a.example", False),
        ("http://a.example.", "a.example", True),
        ("http://a.example.", "a.example.", False),
        ("HTTP://A.EXAMPLE", "a.example", False),
        ("http://a.example/", "a.example", True),
        ("http://a.example https://evil.example", "a.example", True),
        ("http://a.example, https://evil.example", "a.example", True),
        ("http://[::1].evil.example", "[::1]", True),
        ("http://[::1]", "[::1].evil.example", True),
        ("http://[fe80::1%25en0]", "[fe80::1%25en0]", True),
        ("http://evil.example", "evil.example, a.example", True),
        ("http://a.example", "", True),
        ("a.example", "a.example", True),
    ],
)
def test_a_page_is_the_servers_own_by_the_name_it_was_asked_under(
    origin: str, host: str, foreign: bool
) -> None:
    assert is_foreign(origin, host, ()) is foreign
    assert not is_foreign(origin, host, ("*",))


def test_whatever_a_line_is_about_can_be_told() -> None:
    async def told() -> bytes:
        lines = LogLines()
        odd = {"fields": {"path": Path("/x"), "kinds": {1, 2}, "none": None, "deep": [object]}}
        lines.handle(logging.makeLogRecord({"msg": "odd", "levelno": logging.INFO, **odd}))
        return await anext(lines.events(logging.INFO, 10, 0.01))

    assert b'"path":"/x"' in asyncio.run(told())


def test_a_reader_whose_lines_are_logged_does_not_hold_up_the_rest() -> None:
    most = 10_000
    record = logging.makeLogRecord(
        {"msg": "socket.send() raised exception", "levelno": logging.INFO}
    )

    async def read() -> int:
        lines, count = LogLines(), 0
        events = lines.events(logging.INFO, 0, PATIENCE)
        await anext(events)
        lines.handle(record)
        asyncio.get_running_loop().call_soon(lines.drain, 0.0)
        async for _ in events:
            count += 1
            if count == most:
                break
            lines.handle(record)
        return count

    assert asyncio.run(read()) < most, "nothing else got to run"


async def _gap_and_lines(lines: LogLines) -> list[bytes]:
    events = lines.events(logging.INFO, 0, 0.01)
    await anext(events)
    for number in range(log_lines.MOST_LINES + 5):
        lines.handle(logging.makeLogRecord({"msg": f"line {number}", "levelno": logging.INFO}))
    return [await anext(events) for _ in range(2)]


def test_what_a_slow_reader_of_the_log_missed_is_told() -> None:
    async def told() -> list[bytes]:
        return await _gap_and_lines(LogLines())

    gap, line = asyncio.run(told())
    assert b'{"missed":5}' in gap and b"line 5" in line
