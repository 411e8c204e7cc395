"""Responses that take their time: cut off, cancelled, and made in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api.responses_wire import SHORT, check_order, client_of, create, events, numbers, serve, stream
from conftest import PATIENCE, Server, until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    yield from serve(tmp_path_factory.mktemp("responses"), default_model)


@pytest.fixture(scope="module")
def client(tiny: Server) -> openai.OpenAI:
    return client_of(tiny)


ENDLESS = {"model": "tiny", "input": "x", "ignore_eos": True, "max_output_tokens": 6000}


def test_behaviour_10_an_error_in_the_middle_is_response_failed(tiny: Server) -> None:
    create(tiny, input="x", **SHORT)  # the first answer of a server takes longer than others
    for seconds in (1.0, 2.5, 6.0, 15.0):
        found = stream(tiny, **ENDLESS, timeout=seconds)
        last = check_order(found)
        if last["output"]:
            break  # else a busy machine had no time for the first token
    assert found[-1]["type"] == "response.failed"
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert "timeout" in last["error"]["message"]
    assert last["output"][0]["status"] == "incomplete"
    kept = tiny.http.get(f"/v1/responses/{last['id']}").json()
    assert (kept["status"], kept["error"]) == ("failed", last["error"])
    assert tiny.post("/v1/responses", ENDLESS | {"timeout": 0.1}).status_code == 504


def test_behaviour_22_cancel_by_id_and_a_client_that_leaves(tiny: Server) -> None:
    def running() -> list[str]:
        return [r["id"] for r in tiny.status()["requests"]]

    url = f"{tiny.url}/v1/responses"
    with httpx.stream("POST", url, json=ENDLESS | {"stream": True}, timeout=PATIENCE) as answer:
        (id,) = running()
        assert tiny.http.post(f"/v1/requests/{id}/cancel").status_code == 200
        found = events(answer)
    assert found[-1]["response"]["status"] == "cancelled"
    with httpx.stream("POST", url, json=ENDLESS | {"stream": True}, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        generated = next(line for line in lines if line.startswith("data: "))
    assert generated
    assert until(lambda: running() == [])


def test_background_goes_from_queued_to_its_end(tiny: Server, client: openai.OpenAI) -> None:
    generated = client.responses.create(input="x", background=True, **SHORT)
    assert generated.status in ("queued", "in_progress") and generated.background
    seen = [generated.status]
    while seen[-1] in ("queued", "in_progress"):
        seen.append(client.responses.retrieve(generated.id).status)
    assert seen[-1] == "incomplete"
    whole = client.responses.create(input="x", **SHORT)
    assert client.responses.retrieve(generated.id).output_text == whole.output_text
    assert client.responses.cancel(generated.id).status == "incomplete", "too late is no error"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)


def test_background_outlives_its_connection_and_can_be_followed(tiny: Server) -> None:
    body = SHORT | {"input": "x", "max_output_tokens": 300, "ignore_eos": True, "background": True}
    url = f"{tiny.url}/v1/responses"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
    id = first.split('"id":"')[1].split('"')[0]

    def follow(after: int | None = None) -> list[dict[str, Any]]:
        more = {} if after is None else {"starting_after": after}
        query: Any = {"stream": "true"} | more
        with httpx.stream("GET", f"{url}/{id}", params=query, timeout=PATIENCE) as answer:
            return events(answer)

    live = follow()
    last = check_order(live)
    assert [e["type"] for e in live[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert last["usage"]["output_tokens"] == 300
    assert numbers(follow(after=5)) == list(range(6, len(live)))
    assert follow(after=len(live) - 2) == live[-1:], "from the store, as it was"
    other = create(tiny, **SHORT, input="x")["id"]
    refused = tiny.http.get(f"/v1/responses/{other}", params={"stream": "true"})
    assert refused.status_code == 400


def test_background_can_be_cancelled_and_deleted(tiny: Server, client: openai.OpenAI) -> None:
    endless: Any = {
        "model": "tiny",
        "input": "x",
        "max_output_tokens": 6000,
        "extra_body": {"ignore_eos": True},
        "background": True,
    }
    generated = client.responses.create(**endless)
    with pytest.raises(openai.BadRequestError, match="not finished"):
        client.responses.create(input="x", previous_response_id=generated.id, **SHORT)
    ended = client.responses.cancel(generated.id)
    assert ended.status == "cancelled"
    assert client.responses.retrieve(generated.id).status == "cancelled"
    assert until(lambda: tiny.status()["requests"] == [])
    gone = client.responses.create(**endless)
    client.responses.delete(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    assert until(lambda: tiny.status()["requests"] == [])
