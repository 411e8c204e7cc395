"""API keys, rate limits and web pages' origins on a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api import scrape, tiny_folder
from conftest import PATIENCE, Server

BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("keys") / "tiny", default_model)


@pytest.fixture(scope="module")
def guarded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with three keys, tight limits, two further names and one friendly web page."""
    file = tmp_path_factory.mktemp("keyfile") / "keys"
    file.write_text("file:sk-file\ntokens:sk-tokens\n")
    running = Server(
        str(tiny), "--name", "tiny", "--alias", "gpt-4o", "--alias", "small/one",
        "--api-key-file", str(file), "--rate-requests", "6", "--rate-tokens", "100",
        "--cors-origin", "https://page.example",
        env={"MILLRACE_API_KEY": "sk-env sk-env2"},
    ).wait_ready()  # fmt: skip
    yield running
    running.stop()


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


OPENAI = {"message", "type", "param", "code"}
PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/status"),
    ("GET", "/metrics"),
    ("POST", "/v1/messages"),
    ("POST", "/api/chat"),
    ("POST", "/v1/responses"),
    ("POST", "/generate"),
    ("GET", "/nothing/here"),
    ("POST", "/health"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("headers", [{}, _bearer("sk-wrong"), {"x-api-key": ""}])
def test_without_a_key_nothing_is_told(
    guarded: Server, method: str, path: str, headers: dict[str, str]
) -> None:
    if path == "/health" and method == "POST":
        pytest.skip("an open path, whatever the method")
    response = guarded.http.request(method, guarded.url + path, headers=headers, json={})
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    body = response.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
    elif path.startswith("/api/"):
        assert isinstance(body["error"], str)
    else:
        assert set(body["error"]) == OPENAI
        assert body["error"]["type"] == "authentication_error"
        assert body["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/docs", "/openapi.json"])
def test_what_is_public_stays_so(guarded: Server, path: str) -> None:
    assert guarded.http.get(path).status_code == 200


@pytest.mark.parametrize("key", ["sk-env", "sk-env2", "sk-file", "sk-tokens"])
def test_either_header_will_do(guarded: Server, key: str) -> None:
    for headers in (_bearer(key), {"x-api-key": key}, _bearer("none") | {"x-api-key": key}):
        assert guarded.http.get("/v1/models", headers=headers).status_code == 200


def test_a_server_without_an_admin_key_says_how_to_give_one(guarded: Server) -> None:
    assert "no API key has the role admin" in guarded.log()
    assert "--admin-key" in guarded.log() and "NAME[admin]:KEY" in guarded.log()


def test_a_large_body_is_refused_as_well(guarded: Server) -> None:
    response = guarded.http.post("/v1/completions", content=b"x" * 4_000_000)
    assert response.status_code == 401


def test_the_sdk_raises_its_own_error(guarded: Server) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_further_names_are_listed_and_answered(guarded: Server) -> None:
    headers = _bearer("sk-env2")
    listed = guarded.http.get("/v1/models", headers=headers).json()["data"]
    assert [m["id"] for m in listed] == ["tiny", "gpt-4o", "small/one"]
    assert [m.get("alias_of") for m in listed] == [None, "tiny", "tiny"]
    for name in ("gpt-4o", "small/one"):
        one = guarded.http.get(f"/v1/models/{name}", headers=headers).json()
        assert one["id"] == name
    answer = guarded.post("/v1/completions", BODY | {"model": "small/one"}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["model"] == "tiny"


def test_requests_are_limited_per_key(guarded: Server) -> None:
    left = []
    for _ in range(6):
        response = guarded.post(
            "/v1/completions", BODY | {"max_tokens": 1}, headers=_bearer("sk-env")
        )
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "6"
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        left.append(int(response.headers["x-ratelimit-remaining-requests"]))
    assert left[0] == 5 and left == sorted(left, reverse=True)
    refused = guarded.post("/v1/completions", BODY, headers=_bearer("sk-env"))
    while refused.status_code == 200:  # a slow machine: the bucket fills by one in ten seconds
        refused = guarded.post(
            "/v1/completions", BODY | {"max_tokens": 1}, headers=_bearer("sk-env")
        )
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 10
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert set(error) == OPENAI
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    messages = guarded.post("/v1/messages", {}, headers={"x-api-key": "sk-env"})
    while messages.status_code == 400:  # as above
        messages = guarded.post("/v1/messages", {}, headers={"x-api-key": "sk-env"})
    assert messages.status_code == 429
    assert messages.json()["error"]["type"] == "rate_limit_error"
    assert messages.headers["anthropic-ratelimit-requests-limit"] == "6"
    assert messages.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert guarded.http.get("/v1/models", headers=_bearer("sk-env")).status_code == 200
    other = guarded.post("/v1/completions", BODY, headers=_bearer("sk-env2"))
    assert other.status_code == 200, "another key has its own share"
    counted = guarded.http.get("/metrics", headers=_bearer("sk-env")).text
    assert 'endpoint="/v1/completions",model="",outcome="rate_limit_exceeded"' in counted
    assert 'endpoint="",model="",outcome="invalid_api_key"' in counted
    assert "/nothing/here" not in counted


def test_tokens_are_charged_when_an_answer_ends(guarded: Server) -> None:
    headers = _bearer("sk-tokens")
    first = guarded.post("/v1/completions", BODY | {"max_tokens": 20}, headers=headers)
    cost = first.json()["usage"]["total_tokens"]
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    assert 100 - cost <= left <= 100 - cost + 20
    stream = guarded.post(
        "/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 120}, headers=headers
    )
    assert stream.text.endswith("data: [DONE]\n\n")
    refused = guarded.post("/v1/chat/completions", CHAT, headers=headers)
    assert refused.status_code == 429
    assert "--rate-tokens" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 5
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


def test_a_preflight_needs_no_key(guarded: Server) -> None:
    asking = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    allowed = guarded.http.options("/v1/chat/completions", headers=asking)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    other = guarded.http.options("/v1/models", headers=asking | {"origin": "https://x.example"})
    assert "access-control-allow-origin" not in other.headers
    denied = guarded.http.get("/v1/models", headers={"origin": "https://page.example"})
    assert denied.status_code == 401, "the page may read the refusal"
    assert denied.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in denied.headers["access-control-expose-headers"]


def test_origins_are_off_by_default_and_open_to_all_with_a_star(
    start: Callable[..., Server], tiny: Path
) -> None:
    star = start(str(tiny), "--cors-origin", "*", "--rate-requests", "2").wait_ready()
    page = {"origin": "https://any.example"}
    answer = star.http.get("/v1/models", headers=page)
    assert answer.headers["access-control-allow-origin"] == "*"
    codes = [star.post("/v1/completions", BODY).status_code for _ in range(3)]
    assert codes == [200, 200, 429], "without keys, each address has its share"
    assert scrape.total(star, "millrace_requests_total", outcome="rate_limit_exceeded") == 1


def test_a_server_in_the_open_warns(start: Callable[..., Server], tiny: Path) -> None:
    server = start(str(tiny), "--host", "0.0.0.0").wait_ready()
    assert "without an API key" in server.log()
    plain = server.http.get("/v1/models", headers={"origin": "https://any.example"})
    assert "access-control-allow-origin" not in plain.headers
    assert "x-ratelimit-limit-requests" not in server.post("/v1/completions", BODY).headers


def test_a_key_that_cannot_be_sent_is_told_at_once(tmp_path: Path) -> None:
    import subprocess
    import sys

    ended = subprocess.run(
        [sys.executable, "-m", "millrace", "serve", "--api-key", "two words"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "without spaces" in " ".join(ended.stderr.split())


def test_a_stream_tells_its_limits_at_its_start(guarded: Server) -> None:
    with httpx.stream(
        "POST",
        f"{guarded.url}/v1/completions",
        json=BODY | {"stream": True},
        headers=_bearer("sk-file"),
        timeout=PATIENCE,
    ) as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "5"
        lines = [x.removeprefix("data: ") for x in response.iter_lines() if x.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[0])["choices"]


def test_stored_responses_are_their_keys_own(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
) -> None:
    keys = ("--api-key", "sk-ann", "--api-key", "sk-bob")
    server = start(str(tiny), *keys, "--store", str(tmp_path / "store.sqlite")).wait_ready()

    def ask(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        url = f"{server.url}/v1{path}"
        return httpx.request(method, url, json=body, headers=_bearer(key), timeout=60)

    body = {"input": "hi", "max_output_tokens": 2, "ignore_eos": True}
    generated = ask("sk-ann", "POST", "/responses", body).json()
    talk = ask("sk-ann", "POST", "/conversations", {"items": []}).json()["id"]
    response, said = f"/responses/{generated['id']}", {"type": "item_reference"}
    further = [
        {"previous_response_id": generated["id"]},
        {"conversation": talk},
        {"input": [said | {"id": generated["output"][0]["id"]}]},
    ]
    for more in further:
        missing = 400 if "previous_response_id" in more else 404
        assert ask("sk-bob", "POST", "/responses", body | more).status_code == missing
        assert ask("sk-ann", "POST", "/responses", body | more).status_code == 200
    for method, path in (
        ("POST", f"{response}/cancel"), ("GET", response), ("GET", f"{response}/input_items"),
        ("GET", f"/conversations/{talk}"), ("DELETE", f"/conversations/{talk}"),
        ("DELETE", response),
    ):  # fmt: skip
        assert ask("sk-bob", method, path).status_code == 404
        assert ask("sk-ann", method, path).status_code == (400 if "cancel" in path else 200)


def test_reading_and_deleting_what_is_stored_counts_and_looking_does_not(
    start: Callable[..., Server], tiny: Path, tmp_path: Path
) -> None:
    store = str(tmp_path / "store.sqlite")
    server = start(
        str(tiny), "--store", store, "--rate-requests", "3", "--rate-tokens", "20"
    ).wait_ready()
    made = server.post(
        "/v1/responses", {"input": "hi", "max_output_tokens": 30, "ignore_eos": True}
    )
    assert made.status_code == 200
    path = f"/v1/responses/{made.json()['id']}"
    refused = server.post("/v1/conversations", {})
    assert refused.status_code == 429 and "--rate-tokens" in refused.text
    for _ in range(5):  # these do not count
        for free in ("/v1/models", "/v1/status", "/metrics", "/health", "/v1/requests"):
            answer = server.http.get(free)
            assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers
        assert server.http.delete("/v1/requests/none").status_code == 404
        assert server.post(f"{path}/cancel", {}).status_code == 400
    first = server.http.get(path)
    assert first.status_code == 200, "tokens that were used up do not keep a caller from reading"
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    gets = [server.http.get(f"{path}/input_items").status_code for _ in range(3)]
    assert 200 in gets and 429 in gets, gets
    codes = {server.http.delete(f"/v1/conversations/c{n}").status_code for n in range(3)}
    assert 429 in codes, codes
