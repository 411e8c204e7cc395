"""The gateway over both of the worker's engines: what its clients get is what our own HTTP gives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from smg_gateway.processes import Gateway, WorkerServer
from smg_gateway.script import COUNTED, GREETING, RAW

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Front(NamedTuple):
    gateway: httpx.Client
    worker: WorkerServer
    engine: str
    process: Gateway


@pytest.fixture(scope="module", params=["vllm", "mlx"])
def front(request: pytest.FixtureRequest, folder: Path) -> Iterator[Front]:
    yield from _front(folder, request.param)


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Front]:
    yield from _front(folder, "vllm")


def _front(folder: Path, engine: str) -> Iterator[Front]:
    options = ("--name", "script", "--trust-remote-code", "--smg-engine", engine)
    worker = WorkerServer(str(folder), *options)
    worker.wait_ready()
    gateway = Gateway([worker], "--tool-call-parser", "qwen").wait_ready()
    yield Front(gateway.http, worker, engine, gateway)
    gateway.stop()
    left = worker.status()["requests"]
    worker.stop()
    assert left == [], "the gateway left something running"
    assert "Traceback" not in worker.log()


def _chat(say: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": say}]
    return {"model": "script", "messages": messages, "temperature": 0, "max_tokens": 200, **more}


def _bodies(say: str) -> dict[str, dict[str, Any]]:
    """The same question on every endpoint."""
    sampling = {"temperature": 0, "max_new_tokens": 200}
    return {
        "/v1/chat/completions": _chat(say),
        "/v1/completions": {
            "model": "script", "prompt": RAW, "temperature": 0, "max_tokens": 200,
        },
        "/v1/messages": _chat(say),
        "/generate": {"model": "script", "text": RAW, "sampling_params": sampling},
        "/v1/responses": {
            "model": "script", "input": say, "temperature": 0, "max_output_tokens": 200,
        },
    }  # fmt: skip


def _whole(path: str, answer: Any) -> str:
    match path:
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/messages":
            return "".join(b["text"] for b in answer["content"])
        case "/generate":
            return str((answer[0] if isinstance(answer, list) else answer)["text"])
    parts = [p for item in answer["output"] if item["type"] == "message" for p in item["content"]]
    return "".join(p["text"] for p in parts)


def _streamed(path: str, events: list[Any]) -> str:
    match path:
        case "/v1/chat/completions":
            deltas = [c["delta"] for e in events for c in e["choices"]]
            return "".join(d.get("content") or "" for d in deltas)
        case "/v1/completions":
            return "".join(c["text"] for e in events for c in e["choices"])
        case "/v1/messages":
            return "".join(e["delta"].get("text", "") for e in events if "delta" in e)
        case "/generate":
            return str(events[-1]["text"])  # as SGLang has it, all that was said so far
    return "".join(e["delta"] for e in events if e.get("type") == "response.output_text.delta")


def _events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("say", ["Count 1-10", "anything"])
@pytest.mark.parametrize("path", _bodies(""))
def test_every_endpoint_says_what_our_own_says(front: Front, path: str, say: str) -> None:
    body = _bodies(say)[path]
    ours = _whole(path, front.worker.http.post(path, json=body).json())
    response = front.gateway.post(path, json=body)
    assert response.status_code == 200, response.text
    assert _whole(path, response.json()) == ours
    assert _streamed(path, _events(front.gateway, path, body)) == ours


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_told_as_the_matched_stop(front: Front, stream: bool) -> None:
    (six,) = front.worker.http.post(
        "/tokenize", json={"prompt": "6", "add_special_tokens": False}
    ).json()["tokens"]
    choice = _choice(front, _chat("Count 1-10", stop_token_ids=[six]), stream)
    assert choice["text"] == COUNTED.partition("6")[0]
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == six


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("word", ["6", None])
def test_a_stop_that_is_left_in_is_seen_where_special_tokens_are(
    vllm: Front, word: str | None, skip: bool, trim: bool
) -> None:
    asked = {"prompt": word or "", "add_special_tokens": False}
    ids = vllm.worker.http.post("/tokenize", json=asked).json()["tokens"]
    sampling = {"temperature": 0, "max_new_tokens": 50, "stop_token_ids": ids}
    sampling |= {"no_stop_trim": not trim, "skip_special_tokens": skip}
    body = {"model": "script", "text": RAW, "sampling_params": sampling}
    ours = _whole("/generate", vllm.worker.http.post("/generate", json=body).json())
    told = _whole("/generate", vllm.gateway.post("/generate", json=body).json())
    if not trim and skip and word:
        assert (ours, told) == ("5\n6", "5\n")  # the gateway does not pass it on
    else:
        assert told == ours


def test_the_end_of_an_answer_is_no_matched_stop(front: Front) -> None:
    assert _choice(front, _chat("Count 1-10"), False).get("matched_stop") is None


def test_the_cap_is_a_length(front: Front) -> None:
    assert _choice(front, _chat("Count 1-10", max_tokens=3), True)["finish_reason"] == "length"


def test_what_the_cache_gave_reaches_the_client(front: Front) -> None:
    body = _chat("Count 1-10 and mention the cache")
    first = front.gateway.post("/v1/chat/completions", json=body).json()["usage"]
    usage = front.gateway.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1


def test_tools_that_the_model_calls_are_calls(front: Front) -> None:
    answer = front.gateway.post(
        "/v1/chat/completions", json=_chat("the weather?", tools=[TOOL])
    ).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_a_client_that_leaves_frees_its_row(front: Front) -> None:
    with front.gateway.stream(
        "POST", "/v1/chat/completions", json=_chat("talk", stream=True, max_tokens=3000)
    ) as response:
        next(response.iter_lines())
        assert front.worker.status()["requests"]
    _until(lambda: front.worker.status()["requests"] == [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["hello world", "llo wor"])
def test_a_stop_string_of_several_tokens_is_cut_and_told(
    vllm: Front, stop: str, stream: bool
) -> None:
    choice = _choice(vllm, _chat("greet", stop=[stop, "nowhere"]), stream)
    assert choice["text"] == GREETING.partition(stop)[0]
    assert choice["matched_stop"] == stop
    body = _chat("greet", stop_sequences=[stop])
    answer = vllm.gateway.post("/v1/messages", json=body).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert _whole("/v1/messages", answer).rstrip() == GREETING.partition(stop)[0].rstrip()


def test_two_choices_are_two(vllm: Front) -> None:
    answer = vllm.gateway.post("/v1/chat/completions", json=_chat("Count 1-10", n=2)).json()
    assert [c["message"]["content"] for c in answer["choices"]] == [COUNTED] * 2
    indexes = {c["index"] for e in _events(
        vllm.gateway, "/v1/chat/completions", _chat("Count 1-10", n=2)
    ) for c in e["choices"]}  # fmt: skip
    assert indexes == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_validates(vllm: Front, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    choice = _choice(vllm, _chat("Who?", response_format=form), stream)
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)


@pytest.mark.parametrize(
    ("say", "choice"),
    [
        ("forced", "required"),
        ("Count 1-10", {"type": "function", "function": {"name": "get_weather"}}),
    ],
)
def test_a_demanded_tool_is_called(vllm: Front, say: str, choice: Any) -> None:
    body = _chat(say, tools=[TOOL], tool_choice=choice)
    response = vllm.gateway.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    calls = response.json()["choices"][0]["message"].get("tool_calls")
    assert calls and len(calls) == 1, response.text
    assert calls[0]["function"]["name"] == "get_weather"
    arguments = json.loads(calls[0]["function"]["arguments"])
    jsonschema.validate(arguments, TOOL["function"]["parameters"])  # type: ignore[index]


def test_what_is_wrong_comes_back_as_a_400(vllm: Front) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    for wrong in ({"response_format": form}, {"stop_token_ids": [2**31]}):
        response = vllm.gateway.post("/v1/chat/completions", json=_chat("Who?", **wrong))
        assert response.status_code == 400, response.text


def test_the_router_learns_what_the_cache_holds_and_how_busy_the_worker_is(vllm: Front) -> None:
    vllm.gateway.post("/v1/chat/completions", json=_chat("Count 1-10 " * 30))
    batches = "smg_kv_event_batches_total"
    _until(lambda: any('"applied"' in key for key in vllm.process.metrics(batches)))
    assert not any(vllm.process.metrics("smg_kv_event_gaps_total").values())
    assert not any(vllm.process.metrics("smg_kv_event_parentless_blocks_total").values())
    _until(lambda: _pushed(vllm))


def test_a_gateway_that_dies_frees_its_rows_and_another_takes_its_place(vllm: Front) -> None:
    first = Gateway([vllm.worker]).wait_ready()
    body = _chat("talk", stream=True, max_tokens=3000)
    with ExitStack() as stack:
        streams = [
            stack.enter_context(first.http.stream("POST", "/v1/chat/completions", json=body))
            for _ in range(4)
        ]
        for stream in streams:
            next(stream.iter_raw())
        assert len(vllm.worker.status()["requests"]) == 4
        first.stop()
    _until(lambda: vllm.worker.status()["requests"] == [])
    second = Gateway([vllm.worker]).wait_ready()
    answer = second.http.post("/v1/chat/completions", json=_chat("Count 1-10")).json()
    assert _whole("/v1/chat/completions", answer) == COUNTED
    # What the cache holds may all be known from before: new words are new blocks.
    new = _chat(
        "Words that nobody has sent before, and enough of them for a block of their own: one, two."
    )
    assert second.http.post("/v1/chat/completions", json=new).status_code == 200
    _until(lambda: any('"applied"' in k for k in second.metrics("smg_kv_event_batches_total")))
    second.stop()


def _pushed(front: Front) -> bool:
    worker = front.gateway.get("/workers").json()["workers"][0]
    return bool(worker["engine_load"]["version"] == "pushed")


def _choice(front: Front, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    path = "/v1/chat/completions"
    if not stream:
        response = front.gateway.post(path, json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return {**choice, "text": choice["message"]["content"]}
    events = _events(front.gateway, path, body)
    last = [c for e in events for c in e["choices"] if c["finish_reason"]]
    assert len(last) == 1
    return {**last[0], "text": _streamed(path, events)}


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
