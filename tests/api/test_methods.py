"""Which method does what: GET and HEAD only read, and a refused method is told which there are."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from api.test_hosts import _app

from millrace.api.methods import methods_of
from millrace.api.openapi.routing import every
from millrace.api.origins import CHANGING, CHANGING_GETS
from millrace.config import ApiKey

HOST = "127.0.0.1:8000"
KEY = "sk-methods"
BROWSER = {"accept": "image/avif,*/*;q=0.8", "user-agent": "Mozilla/5.0"}


@pytest.fixture(scope="module")
def plain() -> Any:
    return _app()


@pytest.fixture(scope="module")
def keyed() -> Any:
    return _app(api_keys=(ApiKey(secret=KEY, role="admin"),))


@pytest.fixture(scope="module")
def friendly() -> Any:
    return _app(cors_origins=("https://friend.example",))


def _ask(app: Any, method: str, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, headers=named)

    return asyncio.run(asyncio.wait_for(ask(), 60))


SAME = {"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"}
CROSS = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # no proof: a program, or a browser without Sec-Fetch-Site whose page sends no Referer
        ({}, 405),
        (BROWSER, 405),
        ({"referer": ""}, 405),
        ({"origin": ""}, 405),
        ({"sec_fetch_site": "none"}, 405),
        ({"authorization": "Bearer anything"}, 405),
        # another page, by each of the three headers
        (CROSS, 403),
        (CROSS | {"referer": f"http://{HOST}/"}, 403),
        (CROSS | {"origin": ""}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "something-new"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "file://"}, 403),
        (SAME | {"origin": "https://evil.example"}, 403),
        ({"referer": "https://evil.example/page"}, 403),
        ({"referer": "http://127.0.0.1:8000.evil.example/"}, 403),
        ({"referer": "http://127.0.0.1:8000@evil.example/"}, 403),
        ({"referer": "http://["}, 403),
        ({"referer": "http://127.0.0.1:3000/"}, 403),
        # this server's own page
        (SAME, 200),
        ({"referer": f"http://{HOST}/docs"}, 200),
        ({"origin": f"http://{HOST}"}, 200),
    ],
)
def test_a_get_that_changes_something_needs_proof(
    plain: Any, headers: dict[str, str], status: int
) -> None:
    answer = _ask(plain, "GET", "/flush_cache", **headers)
    assert answer.status_code == status, answer.text
    if status == 405:
        assert answer.headers["allow"] == "POST"
        assert "POST" in answer.json()["error"]["message"]


def test_a_get_that_changes_something_is_answered_with_a_key(keyed: Any) -> None:
    bearer = {"authorization": f"Bearer {KEY}"}
    assert _ask(keyed, "GET", "/flush_cache", **bearer).status_code == 200
    assert _ask(keyed, "GET", "/flush_cache", x_api_key=KEY).status_code == 200
    assert _ask(keyed, "GET", "/flush_cache", **SAME).status_code == 401
    foreign = _ask(keyed, "GET", "/flush_cache", origin="https://evil.example", **bearer)
    assert foreign.status_code == 403


def test_an_allowed_page_may_use_it_by_its_origin(friendly: Any) -> None:
    for headers in ({"origin": "https://friend.example"}, {"referer": "https://friend.example/a"}):
        assert _ask(friendly, "GET", "/flush_cache", **headers).status_code == 200
    assert _ask(friendly, "GET", "/flush_cache", **CROSS).status_code == 403
    assert _ask(_app(cors_origins=("*",)), "GET", "/flush_cache", **CROSS).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"sec_fetch_mode": "cors"}, 200), (SAME, 200), ({"sec_fetch_site": "none"}, 200),
     (CROSS, 403), ({"sec_fetch_site": "same-site"}, 403), ({"origin": "file://"}, 403)],
)  # fmt: skip
def test_a_post_is_refused_to_a_foreign_page_without_an_origin_too(
    plain: Any, headers: dict[str, str], status: int
) -> None:
    assert _ask(plain, "POST", "/flush_cache", **headers).status_code == status


READING = {
    "/", "/health", "/metrics", "/docs", "/openapi.json", "/web/{version}/{name}",
    "/v1/models", "/v1/models/{name:path}", "/v1/library", "/v1/hub/search", "/v1/cache", "/v1/key",
    "/v1/status", "/v1/status/stream", "/v1/logs/stream", "/v1/requests",
    "/v1/responses/{id}", "/v1/responses/{id}/input_items",
    "/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}",
    "/get_model_info", "/model_info", "/get_server_info", "/server_info",
    "/api/version", "/api/tags", "/api/ps",
}  # fmt: skip
"""GETs that were read and found to change nothing: no model is loaded, kept longer or dropped by them."""


def test_no_other_route_changes_something_by_a_method_that_reads(plain: Any) -> None:
    methods: dict[Any, set[str]] = {}
    for route in every(plain.routes):
        methods.setdefault(route.endpoint, set()).update(route.methods or ())
    assert [e for e, m in methods.items() if m & CHANGING and "GET" in m] == []
    gets = {r.path for r in every(plain.routes) if "GET" in (r.methods or ())}
    assert gets == READING | CHANGING_GETS


def test_head_is_get_without_a_body(plain: Any) -> None:
    asked = 0
    for route in every(plain.routes):
        if "GET" not in (route.methods or ()) or "{" in route.path or "/stream" in route.path:
            continue
        if route.path in CHANGING_GETS:
            continue
        got, head = _ask(plain, "GET", route.path), _ask(plain, "HEAD", route.path)
        assert head.status_code == got.status_code, route.path
        assert head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]
        assert "content-length" in head.headers
        asked += 1
    assert asked > 10


@pytest.mark.parametrize("path", ["/v1/status/stream", "/v1/logs/stream"])
def test_head_of_a_stream_ends_at_once(plain: Any, path: str) -> None:
    for _ in range(40):  # more than may listen at a time
        head = _ask(plain, "HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")


def test_head_changes_nothing(plain: Any) -> None:
    for headers in ({}, SAME, {"origin": f"http://{HOST}"}):
        head = _ask(plain, "HEAD", "/flush_cache", **headers)
        assert (head.status_code, head.headers["allow"]) == (405, "GET, POST")
    assert _ask(plain, "HEAD", "/v1/chat/completions").headers["allow"] == "POST"


def test_what_has_a_head_of_its_own_keeps_it(plain: Any) -> None:
    assert _ask(plain, "HEAD", "/api/blobs/sha256:0").status_code == 400
    assert _ask(plain, "HEAD", "/nothing").status_code == 404


def test_every_405_names_the_methods_there_are(plain: Any) -> None:
    seen = set()
    for route in every(plain.routes):
        path = route.path.replace("{name:path}", "x").replace("{", "").replace("}", "")
        for method in ("TRACE", "PATCH", "OPTIONS", "PUT", "GET", "HEAD", "DELETE", "BREW"):
            allowed = methods_of(plain, path)
            if method in allowed:
                continue
            answer = _ask(plain, method, path)
            assert answer.status_code == 405, (method, path)
            assert answer.headers["allow"] == ", ".join(allowed), (method, path)
            seen.add(path)
    assert {"/v1/models", "/v1/messages", "/api/chat", "/web/version/name"} <= seen
    assert _ask(plain, "GET", "/v1/chat/completions").headers["allow"] == "POST"
    assert _ask(plain, "PUT", "/v1/cache").headers["allow"] == "DELETE, GET, HEAD"
