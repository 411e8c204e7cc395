"""OpenAI's endpoints without /v1: the same answers, keys, limits, errors and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import scrape, tiny_folder
from conftest import Server

KEY = {"authorization": "Bearer key"}
LIMIT = 600
PROMPT = {"prompt": "Once", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
UNSTEADY = ("id", "created", "created_at", "completed_at")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    model = tiny_folder.make(tmp_path_factory.mktemp("bare") / "tiny", default_model)
    limits = ("--rate-requests", str(LIMIT), "--max-body", "100000")
    names = ("--name", "tiny", "--alias", "small", "--alias", "org/other")
    running = Server(str(model), *names, "--admin-key", "key", *limits).wait_ready()
    running.http.headers.update(KEY)
    yield running
    running.stop()


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if k not in UNSTEADY}
    return [steady(v) for v in value] if isinstance(value, list) else value


def both(
    tiny: Server, method: str, path: str, **more: Any
) -> tuple[httpx.Response, httpx.Response]:
    """The answers under both names."""
    first, second = (tiny.http.request(method, f"{p}{path}", **more) for p in ("", "/v1"))
    return first, second


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/chat/completions", CHAT, 200),
        ("/completions", PROMPT, 200),
        (
            "/responses",
            {"input": "Hi", "max_output_tokens": 3, "temperature": 0, "store": False},
            200,
        ),
        ("/responses/input_tokens", {"input": "Hi"}, 200),
        ("/embeddings", {"input": "Hi"}, 400),
        ("/chat/completions", CHAT | {"model": "unknown"}, 404),
        ("/completions", {"prompt": "x" * 200_000}, 413),
        ("/chat/completions/more", {}, 404),
    ],
)
def test_the_same_is_answered(tiny: Server, path: str, body: dict[str, Any], status: int) -> None:
    for _ in range(2):  # what the first one leaves in the cache, the others find
        bare, full = both(tiny, "POST", path, json=body)
    assert bare.status_code == full.status_code == status
    assert steady(bare.json()) == steady(full.json())
    assert "x-ratelimit-remaining-requests" in bare.headers
    for name in ("x-ratelimit-limit-requests", "content-type", "x-millrace-ignored"):
        assert bare.headers.get(name) == full.headers.get(name)
    if status != 200:
        assert set(bare.json()["error"]) == {"message", "type", "param", "code"}


def test_streams_are_the_same(tiny: Server) -> None:
    body = CHAT | {"stream": True}
    bare, full = both(tiny, "POST", "/chat/completions", json=body)
    assert bare.text.count("data: ") == full.text.count("data: ") > 2
    assert bare.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/models", "/models/tiny", "/models/org/other", "/models/none"])
def test_models_are_listed(tiny: Server, path: str) -> None:
    bare, full = both(tiny, "GET", path)
    assert (bare.status_code, bare.json()) == (full.status_code, full.json())
    assert bare.status_code == (404 if path.endswith("none") else 200)


def test_paths_of_their_own_stay_theirs(tiny: Server) -> None:
    assert tiny.post("/models/load", {"model": "tiny"}).json() == {"success": True}
    assert tiny.http.get("/modelsx").status_code == 404


def test_a_key_is_needed_and_requests_are_counted(tiny: Server) -> None:
    for method, path in (("GET", "/models"), ("POST", "/completions"), ("GET", "/responses/x")):
        urls = (f"{tiny.url}{path}", f"{tiny.url}/v1{path}")
        bare, full = (httpx.request(method, url, json=PROMPT) for url in urls)
        assert bare.status_code == full.status_code == 401
        assert bare.json() == full.json()
    first = tiny.post("/completions", PROMPT | {"prompt": ["a"] * 100})
    assert int(first.headers["x-ratelimit-remaining-requests"]) < LIMIT - 50


def test_metrics_have_the_name_with_the_prefix(tiny: Server) -> None:
    def count(endpoint: str) -> float:
        return scrape.total(tiny, "millrace_requests_total", endpoint=endpoint)

    before = count("/v1/completions")
    tiny.post("/completions", PROMPT).raise_for_status()
    assert count("/v1/completions") == before + 1
    assert count("/completions") == 0


def test_the_description_mentions_them_once(tiny: Server) -> None:
    document = tiny.http.get("/openapi.json").json()
    assert "/chat/completions" in document["info"]["description"]
    assert {"/chat/completions", "/completions", "/embeddings", "/models"}.isdisjoint(
        document["paths"]
    )


def test_an_unknown_model_is_told_the_aliases_too(tiny: Server) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        answer = tiny.post(path, body | {"model": "unknown"})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert "tiny (also: small, org/other)" in message
