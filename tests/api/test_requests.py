"""Requests by name: cancelled, timed, prioritised, and several answers from one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api import scrape
from conftest import PATIENCE, Server, held, until

LONG = {"prompt": "Once", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture(autouse=True)
def _nothing_left_behind(server: Server) -> Iterator[None]:
    yield
    _until(lambda: server.status()["requests"] == [])


def _until(condition: Callable[[], object]) -> None:
    assert until(condition), "it does not come to pass"


def _send(server: Server, id: str, body: dict[str, Any]) -> httpx.Response:
    return server.post("/v1/completions", body, headers={"x-request-id": id})


def _running(server: Server, id: str) -> dict[str, Any] | None:
    return next((r for r in server.status()["requests"] if r["id"] == id), None)


def _decoding(server: Server, id: str) -> bool:
    request = _running(server, id)
    return request is not None and request["made_tokens"] > 0


def _begin(
    server: Server, pool: ThreadPoolExecutor, id: str, **more: Any
) -> Future[httpx.Response]:
    """A long request that is being answered when this returns."""
    answer = pool.submit(_send, server, id, LONG | more)
    _until(lambda: _decoding(server, id))
    return answer


def _events(response: httpx.Response) -> list[Any]:
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    return [x if x == "[DONE]" else json.loads(x) for x in lines]


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def _cancel(server: Server, id: str, how: str) -> httpx.Response:
    if how == "DELETE":
        return server.http.delete(f"/v1/requests/{id}", timeout=PATIENCE)
    return server.post(f"/v1/requests/{id}/cancel", None)


@pytest.mark.parametrize("how", ["POST", "DELETE"])
def test_a_whole_answer_is_cancelled(server: Server, pool: ThreadPoolExecutor, how: str) -> None:
    answer = _begin(server, pool, f"whole-{how}")
    cancelled = _cancel(server, f"whole-{how}", how)
    assert cancelled.status_code == 200
    assert cancelled.json() == {"id": f"whole-{how}", "cancelled": True}
    assert _error(answer.result(PATIENCE), 499)["code"] == "cancelled"


@pytest.mark.parametrize("how", ["POST", "DELETE"])
def test_a_stream_is_cancelled_with_an_error_event(
    server: Server, pool: ThreadPoolExecutor, how: str
) -> None:
    answer = _begin(server, pool, f"stream-{how}", stream=True)
    assert _cancel(server, f"stream-{how}", how).status_code == 200
    *pieces, last = _events(answer.result(PATIENCE))
    assert pieces and all(p["choices"] for p in pieces)
    assert last["error"]["code"] == "cancelled"


def test_a_request_is_cancelled_in_prefill(server: Server, pool: ThreadPoolExecutor) -> None:
    prompt = "Cancelled before it says a word. " * 900
    answer = pool.submit(_send, server, "prefill", {"prompt": prompt, "max_tokens": 1})
    _until(lambda: (_running(server, "prefill") or {"phase": ""})["phase"] == "prefill")
    assert _cancel(server, "prefill", "POST").status_code == 200
    assert _error(answer.result(PATIENCE), 499)["code"] == "cancelled"
    _until(lambda: scrape.total(server, "millrace_kv_bytes") == 0)


def test_a_list_of_prompts_is_cancelled_as_one(server: Server, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(_send, server, "list", LONG | {"prompt": ["Once", "Twice"]})
    _until(lambda: len([r for r in server.status()["requests"] if r["made_tokens"]]) == 2)
    assert _cancel(server, "list", "DELETE").status_code == 200
    assert _error(answer.result(PATIENCE), 499)["code"] == "cancelled"


@pytest.mark.parametrize("how", ["POST", "DELETE"])
def test_an_unknown_id_is_a_404(server: Server, how: str) -> None:
    assert _error(_cancel(server, "nobody", how), 404)["code"] == "not_found"
    assert _send(server, "done", SHORT).status_code == 200
    _error(_cancel(server, "done", how), 404)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_is_the_clients_or_a_fresh_one(server: Server, path: str, stream: bool) -> None:
    body = SHORT | {"stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    chosen = server.post(path, body, headers={"x-request-id": "My_own.id:1-2"})
    fresh = [server.post(path, body).headers["x-request-id"] for _ in range(2)]
    assert chosen.headers["x-request-id"] == "My_own.id:1-2"
    assert len(set(fresh)) == 2
    reported = _events(chosen)[0]["id"] if stream else chosen.json()["id"]
    assert reported == "My_own.id:1-2"


def test_an_id_in_use_is_refused_and_the_first_goes_on(
    server: Server, pool: ThreadPoolExecutor
) -> None:
    with held(server.engine):
        answer = pool.submit(_send, server, "twice", LONG | {"max_tokens": 60})
        _until(lambda: _running(server, "twice"))
        assert "twice" in _error(_send(server, "twice", SHORT), 400)["message"]
    assert answer.result(PATIENCE).json()["usage"]["completion_tokens"] == 60
    assert _send(server, "twice", SHORT).status_code == 200


@pytest.mark.parametrize("id", ["", "a b", "a/b", "a#1", "x" * 129])
def test_an_invalid_id_is_refused(server: Server, id: str) -> None:
    assert _error(_send(server, id, SHORT), 400)["param"] == "x-request-id"


def test_a_timeout_is_a_504(server: Server) -> None:
    error = _error(server.post("/v1/completions", LONG | {"timeout": 0.5}), 504)
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert "0.5 seconds" in error["message"]


def test_a_timeout_in_a_stream_is_an_error_event(server: Server) -> None:
    for seconds in (1, 4, 16):
        response = server.post("/v1/completions", LONG | {"timeout": seconds, "stream": True})
        if response.status_code == 200 and len(_events(response)) > 1:
            break  # else a busy machine had no time for the first piece
    *pieces, last = _events(response)
    assert pieces and all(p["choices"] for p in pieces)
    assert last["error"]["type"] == "timeout_error"


def test_a_timeout_that_is_kept_changes_nothing(server: Server) -> None:
    response = server.post("/v1/completions", SHORT | {"timeout": 100})
    assert response.json()["usage"]["completion_tokens"] == 2
    _error(server.post("/v1/completions", SHORT | {"timeout": 0}), 400)


def test_priority_is_taken_and_told(server: Server, pool: ThreadPoolExecutor) -> None:
    with held(server.engine):
        answer = pool.submit(_send, server, "urgent", SHORT | {"priority": 7})
        _until(lambda: _running(server, "urgent"))
        assert (_running(server, "urgent") or {"priority": None})["priority"] == 7
    assert answer.result(PATIENCE).status_code == 200
    assert _error(server.post("/v1/completions", SHORT | {"priority": 10**6}), 400)


def test_the_higher_priority_is_served_first(
    start: Callable[..., Server], pool: ThreadPoolExecutor
) -> None:
    alone = start("--max-running", "1").wait_ready()
    first = _begin(alone, pool, "first")
    waiting = []
    for id, priority in (("low", -1), ("usual", 0), ("high", 1)):
        waiting.append(pool.submit(_send, alone, id, SHORT | {"priority": priority}))
        _until(lambda id=id: _running(alone, id))  # type: ignore[misc]
    assert _cancel(alone, "first", "DELETE").status_code == 200
    assert _error(first.result(PATIENCE), 499)
    for done in waiting:
        done.result(PATIENCE)
    ended = alone.http.get("/v1/requests", params={"limit": 3}).json()["ended"]
    assert [r["id"] for r in ended] == ["low", "usual", "high"], "newest first"


def test_four_answers_prefill_their_prompt_once(server: Server) -> None:
    def run() -> float:
        return scrape.total(server, "millrace_prefilled_tokens_total")

    before, begun = run(), scrape.total(server, "millrace_prompt_tokens_total")
    prompt = "Four answers to one and the same question: " + "why is it so long? " * 82
    body = {"prompt": prompt, "n": 4, "max_tokens": 6, "temperature": 1.0, "seed": 1}
    answer = server.post("/v1/completions", body | {"ignore_eos": True}).json()
    usage = answer["usage"]
    assert 480 <= usage["prompt_tokens"] <= 540
    assert usage["completion_tokens"] == 24
    assert run() - before == usage["prompt_tokens"]
    assert scrape.total(server, "millrace_prompt_tokens_total") - begun == usage["prompt_tokens"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert len({c["text"] for c in answer["choices"]}) == 4


def test_best_of_tells_the_likeliest(server: Server) -> None:
    body = {"prompt": "My favourite", "max_tokens": 5, "temperature": 1.5, "seed": 4, "logprobs": 0}
    every = server.post("/v1/completions", body | {"n": 4}).json()["choices"]

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return float(sum(scores) / len(scores))

    ranked = sorted(every, key=mean, reverse=True)
    best = server.post("/v1/completions", body | {"best_of": 4, "n": 2}).json()
    assert [c["text"] for c in best["choices"]] == [c["text"] for c in ranked[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] > 10, "what was made is counted, not what is told"
    _error(server.post("/v1/completions", body | {"best_of": 1, "n": 2}), 400)
    _error(server.post("/v1/completions", body | {"best_of": 2, "stream": True}), 400)
