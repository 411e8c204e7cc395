"""What every endpoint owes its users, lines 1 to 12 of the list of behaviours: test_NN is line NN.

Requests, errors and streams.
Short and black-box; what a line means in depth is tested where its own feature is.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api.endpoint import Call, Endpoint, frames
from api.endpoints import (
    ALL,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
)
from conftest import PATIENCE, held

from behaviours.owed import (
    HELLO,
    KEY,
    LONG,
    LOOK,
    QUEUE,
    RUNNING,
    SHORT,
    WINDOW,
    Mill,
    both,
    every,
    every_talk,
    post,
    until,
)

MARKUP = re.compile(r"<\|?/?(im_|think|tool)|tool_call|\"arguments\"|\ufffd")


@every
def test_01_an_unknown_model_is_a_404_that_names_those_there_are(
    tiny: httpx.Client, endpoint: Endpoint
) -> None:
    refused = post(tiny, endpoint, endpoint.body("hi", model="gpt-9", **SHORT))
    assert refused.status_code == 404
    assert "tiny" in endpoint.error(refused) and "gpt-9" in endpoint.error(refused)
    named = [endpoint.whole(tiny, endpoint.body("hi", model=m, **SHORT)) for m in ("tiny", "mill")]
    assert named == [endpoint.whole(tiny, endpoint.body("hi", **SHORT))] * 2


@every
def test_02_max_tokens_is_positive_and_else_what_the_window_leaves(
    mill: Mill, endpoint: Endpoint
) -> None:
    for wrong in (0, -3):
        refused = post(mill.client, endpoint, endpoint.body("hi", max_tokens=wrong))
        assert 400 <= refused.status_code < 500
        assert endpoint.error(refused)
    if endpoint is MESSAGES:
        missing = mill.client.post(endpoint.path, json={"messages": [{"role": "user"}]})
        assert missing.status_code == 400, "this protocol demands it"
        return
    body = endpoint.body("hi", **{"max_tokens": None} if endpoint is GENERATE else {})
    with endpoint.open(mill.client, body):
        request = mill.only()
        assert request["prompt_tokens"] + request["max_tokens"] == WINDOW
    assert mill.idle()
    if endpoint is CHAT:
        said = CHAT.whole(mill.client, CHAT.body("hi") | {"max_completion_tokens": 3})
        assert (said.finish, said.generated) == ("length", 3)


@every
def test_03_a_key_is_needed_in_either_header(mill: Mill, endpoint: Endpoint) -> None:
    def ask(**headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url, body = f"{mill.server.url}{endpoint.path}", endpoint.body("hi", **SHORT)
        return httpx.post(url, json=body, headers=named, timeout=PATIENCE)

    for refused in (ask(), ask(authorization="Bearer no"), ask(x_api_key="no")):
        assert refused.status_code == 401
        assert endpoint.error(refused)
    assert ask(authorization=f"Bearer {KEY}").status_code == 200
    assert ask(x_api_key=KEY).status_code == 200


def test_04_too_much_load_is_told_at_once(mill: Mill) -> None:
    full = COMPLETIONS.body("Once", n=RUNNING + QUEUE, ignore_eos=True, **LONG)
    with COMPLETIONS.open(mill.client, full) as response:
        lines = response.iter_lines()  # held: without it, httpx lets the connection go
        next(lines)
        with held(mill.engine):
            for endpoint in ALL:
                for stream in (False, True):
                    body = endpoint.body("hi", **SHORT) | {"stream": stream}
                    refused = mill.client.post(endpoint.path, json=body)
                    assert refused.status_code == 429, endpoint
                    assert mill.only()["id"], "told while those before it still run"
                    assert int(refused.headers["retry-after"]) >= 1
                    assert endpoint.error(refused)
    assert mill.idle()


REFUSED: dict[Endpoint, tuple[str, dict[str, Any]]] = {
    CHAT: ("modalities", {"modalities": ["text", "audio"]}),
    COMPLETIONS: ("tools", {"tools": [{"type": "function"}]}),
    MESSAGES: ("n", {"n": 2}),
    RESPONSES: ("n", {"n": 2}),
    GENERATE: ("stop_regex", {"sampling_params": {"stop_regex": "a+"}}),
    OLLAMA: ("mirostat", {"options": {"mirostat": 2}}),
}
LABELS: dict[Endpoint, dict[str, Any]] = {
    CHAT: {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    COMPLETIONS: {"user": "me"},
    MESSAGES: {"metadata": {"user_id": "me"}, "service_tier": "auto"},
    RESPONSES: {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto"},
    GENERATE: {"session_id": "s"},
    OLLAMA: {"keep_alive": "5m"},
}


@every
def test_05_errors_have_the_protocols_shape_and_nothing_is_ignored_in_silence(
    tiny: httpx.Client, endpoint: Endpoint
) -> None:
    wrong = post(tiny, endpoint, endpoint.body("hi", temperature="hot"))
    assert wrong.status_code == 400
    assert "temperature" in endpoint.error(wrong)
    name, field = REFUSED[endpoint]
    refused = post(tiny, endpoint, endpoint.body("hi") | field)
    assert refused.status_code == 400
    assert f"'{name}'" in endpoint.error(refused)
    body = endpoint.body("hi", **SHORT) | LABELS[endpoint]
    labelled = post(tiny, endpoint, body | {"made_up": 1})
    assert labelled.status_code == 200
    assert labelled.headers["x-millrace-ignored"] == "made_up"


def test_05_the_fields_that_others_ignore_are_honoured(
    tiny: httpx.Client, talker: httpx.Client
) -> None:
    def ask(**more: Any) -> Any:
        body = CHAT.body("hi", **SHORT | {"temperature": 1, "seed": 3}) | more
        return post(tiny, CHAT, body).json()["choices"]

    first, second = ask(n=2)
    assert first["message"] != second["message"]
    assert ask()[0]["message"] == first["message"] != ask(seed=4)[0]["message"]
    scores = ask(logprobs=True, top_logprobs=2)[0]["logprobs"]["content"]
    assert len(scores) == 4 and all(len(s["top_logprobs"]) == 2 for s in scores)
    bias = {"temperature": 0, "logit_bias": {"77": 100, "78": 99}}
    same = ask(**bias, logprobs=True)[0]["logprobs"]["content"]
    other = ask(**bias, logprobs=True, frequency_penalty=2)[0]["logprobs"]["content"]
    assert [len({s["token"] for s in reported}) for reported in (same, other)] == [1, 2]
    body = CHAT.body("two calls", tools=[LOOK], temperature=0) | {"parallel_tool_calls": False}
    assert len(CHAT.whole(talker, body).calls) == 1
    reported = post(talker, CHAT, CHAT.body("hi") | {"reasoning_effort": "none"})
    assert "reasoning_content" not in reported.json()["choices"][0]["message"]


@every
def test_06_a_prompt_beyond_the_window_is_told_with_both_numbers(
    tiny: httpx.Client, endpoint: Endpoint
) -> None:
    refused = post(tiny, endpoint, endpoint.body("word " * 9000, **SHORT))
    assert refused.status_code == 400
    numbers = {int(n) for n in re.findall(r"\d+", endpoint.error(refused))}
    assert WINDOW in numbers and any(9000 <= n < 9100 for n in numbers)
    if endpoint not in (MESSAGES, OLLAMA):
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@every
def test_07_a_stream_has_one_finish_and_then_its_end(
    tiny: httpx.Client, endpoint: Endpoint
) -> None:
    with endpoint.open(tiny, endpoint.body("hi", **SHORT)) as response:
        lines = [line for line in response.iter_lines() if line.strip()]
    last = lines[-1].removeprefix("data: ")
    if endpoint.end == "[DONE]":
        assert last == endpoint.end and sum(line.endswith("[DONE]") for line in lines) == 1
    elif endpoint is OLLAMA:
        assert json.loads(last)["done"] is True
    else:
        assert json.loads(last)["type"] in (endpoint.end, "response.incomplete")
    # Reading it checks the rest of the frame.
    assert endpoint.stream(tiny, endpoint.body("hi", **SHORT)).finish == "length"


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS], ids=str)
def test_08_usage_comes_once_and_only_on_demand(tiny: httpx.Client, endpoint: Endpoint) -> None:
    for options in ({"include_usage": True}, {"include_usage": False}, None):
        body = endpoint.body("hi", n=2, **SHORT) | {"stream_options": options}
        with endpoint.open(tiny, body) as response:
            *chunks, done = (f.data for f in frames(response.iter_lines()))
        assert done == "[DONE]"
        reported = [c for c in chunks if c.get("usage")]
        assert [c["choices"] for c in reported] == (
            [[]] if options == {"include_usage": True} else []
        )
        assert not reported or reported[0] is chunks[-1]


@every
def test_09_streamed_and_whole_are_the_same(
    tiny: httpx.Client, talker: httpx.Client, endpoint: Endpoint
) -> None:
    assert both(tiny, endpoint, "hi", max_tokens=20, temperature=0).text
    if not endpoint.is_raw:
        said = both(talker, endpoint, "mixed", tools=[LOOK], temperature=0)
        assert (said.text, said.thought) == (HELLO, "I must look.")
        assert said.calls == (Call("look", '{"at": "sky", "long": false}'),)


@every
def test_10_an_error_in_the_middle_is_an_error_event(mill: Mill, endpoint: Endpoint) -> None:
    id = f"broken-{endpoint}"
    # Sampled: the likeliest tokens of random weights may be halves of characters for ever.
    body = endpoint.body("hi", **LONG | {"temperature": 1, "seed": 10})
    with endpoint.open(mill.client, body, headers={"x-request-id": id}) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(("data: ", "{")))
        assert mill.client.post(f"/v1/requests/{id}/cancel").status_code == 200
        *before, last = frames(lines)
    if endpoint is GENERATE:
        assert before[-1].data["meta_info"]["finish_reason"]["type"] == "abort"
    elif endpoint is RESPONSES:
        assert last.data["type"] == "response.failed"
        assert last.data["response"]["status"] == "cancelled"
    else:
        assert "cancelled" in endpoint.trouble(last.data)
        assert last.name == ("error" if endpoint is MESSAGES else None)


@every_talk
def test_11_no_markup_and_no_half_character_is_content(
    talker: httpx.Client, endpoint: Endpoint
) -> None:
    for say in ("mixed", "two calls", "hi", "not offered"):
        for tools in ({}, {"tools": [LOOK]}):
            body = endpoint.body(say, temperature=0, **tools)
            said = endpoint.stream(talker, body)
            calls = "" if tools and say != "not offered" else '"arguments"'
            for piece in (*said.pieces, said.thought):
                assert not MARKUP.search(piece.replace(calls, "")), (say, piece)


@pytest.mark.parametrize("endpoint", [e for e in ALL if "logit_bias" in e.where], ids=str)
def test_11_no_special_token_is_content(tiny: httpx.Client, endpoint: Endpoint) -> None:
    said = endpoint.stream(tiny, endpoint.body("hi", logit_bias={"1": 100}, **SHORT))
    assert (said.text, said.generated) == ("", 4)


@every
def test_12_a_long_prefill_is_kept_alive(mill: Mill, endpoint: Endpoint) -> None:
    """Health is asked for one time after the other, and answers a dozen times before it is over.

    Tried a few times: what stalls may sleep through a whole prompt.
    """
    for turn in range(5):
        text, answered = _while_it_is_read(mill, endpoint, turn)
        if endpoint is MESSAGES:
            alive = text.count("event: ping") > 1
        elif endpoint is OLLAMA:
            alive = text.startswith(" ")
        else:
            alive = ": keep-alive\n\n" in text
        if alive and answered > 12:
            return
    raise AssertionError((alive, answered))


def _while_it_is_read(mill: Mill, endpoint: Endpoint, turn: int) -> tuple[str, int]:
    """The answer to a long prompt, and how often the server was well meanwhile."""
    body = endpoint.body("mill " * 4000, cache_salt=f"12 {endpoint} {turn}", **SHORT)
    answered = 0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=mill.server.url) as other:
        told = pool.submit(_text, mill, endpoint, body)
        until(lambda: told.done() or mill.requests)
        while not told.done():
            answered += other.get("/health", timeout=PATIENCE).status_code == 200
    return told.result(), answered


def _text(mill: Mill, endpoint: Endpoint, body: dict[str, Any]) -> str:
    with endpoint.open(mill.client, body) as response:
        return "".join(response.iter_text())
