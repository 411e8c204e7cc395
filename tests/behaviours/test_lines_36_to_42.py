"""What every endpoint owes its users, lines 36 to 42 of the list of behaviours: test_NN is line NN.

Hostile input, broken engines and mixed load: each of these was seen to fail once.
Nothing here is asserted of a clock but where a line is about time itself, and then as a share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api.endpoint import Endpoint
from api.endpoints import ALL, CHAT, COMPLETIONS, GENERATE, OLLAMA, RESPONSES

from behaviours.hostile import (
    FIELDS,
    NUMBERS,
    beside,
    with_number,
)
from behaviours.owed import ENDS, LONG, SHORT, Mill, every, post, until


@pytest.fixture
def unharmed(mill: Mill) -> Iterator[None]:
    """Somebody else's answers stay the same meanwhile, and the engine lives."""
    body = COMPLETIONS.body("Once upon a time", max_tokens=100, temperature=0, ignore_eos=True)
    alone = COMPLETIONS.whole(mill.client, body)
    deaths = mill.metric("millrace_engine_restarts_total")
    done = threading.Event()

    def repeat() -> set[str]:
        texts = set()
        while not done.is_set():
            texts.add(COMPLETIONS.whole(mill.client, body).text)
        return texts

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(repeat)
        try:
            yield
        finally:
            done.set()
        assert told.result() == {alone.text}
    assert mill.idle(), mill.requests
    # Its process may be another: Ollama's `keep_alive` lets go of a model that nobody uses at that moment.
    assert mill.metric("millrace_engine_restarts_total") == deaths


def _brief(endpoint: Endpoint) -> dict[str, Any]:
    """A request that ends after a token or two, however many it may make."""
    if endpoint is OLLAMA:
        return endpoint.body("hi", schema={"const": 1}, **SHORT)
    return endpoint.body("hi", logit_bias={str(ENDS["tokenizer"]): 100}, **SHORT)


@every
def test_36_a_number_is_honoured_or_refused(mill: Mill, unharmed: None, endpoint: Endpoint) -> None:
    answered = 0
    for field in FIELDS[endpoint]:
        for number in NUMBERS:
            content = with_number(_brief(endpoint) | {"stream": False}, field, number)
            response = mill.client.post(endpoint.path, content=content)
            answered += response.status_code == 200
            if response.status_code == 504 and field == "timeout":
                continue
            assert response.status_code in (200, 400), (field, number, response.text)
            assert response.status_code == 200 or endpoint.error(response)
    assert answered > len(FIELDS[endpoint]), "most fields take some of them"


def test_36_token_ids_are_the_vocabularys(mill: Mill, unharmed: None) -> None:
    for wrong in (49152, 1 << 31, 1 << 64, 1 << 70, -1):
        for endpoint in (CHAT, COMPLETIONS, RESPONSES, GENERATE):
            body = endpoint.body("hi", stop_token_ids=[wrong], **SHORT)
            refused = [post(mill.client, endpoint, body)]
            place = body.get("sampling_params", body)
            place["min_new_tokens" if endpoint is GENERATE else "min_tokens"] = 2
            refused += [post(mill.client, endpoint, body)]
            body = endpoint.body("hi", logit_bias={str(wrong): 1}, **SHORT)
            refused += [post(mill.client, endpoint, body)]
            for response in refused:
                assert response.status_code == 400, (endpoint, wrong, response.text)
                assert endpoint.error(response)
        others: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": [5, wrong], "max_tokens": 1}),
            ("/v1/completions", {"prompt": [[5], [wrong]], "max_tokens": 1}),
            ("/generate", {"input_ids": [5, wrong]}),
            ("/generate", {"input_ids": [[5], [wrong]]}),
            ("/api/generate", {"prompt": "hi", "context": [wrong], "stream": False}),
            ("/detokenize", {"tokens": [wrong]}),
        ]
        for path, body in others:
            response = mill.client.post(path, json=body)
            assert response.status_code == 400, (path, body, response.text)


@pytest.mark.parametrize("cut", ["top_p", "typical_p"])
def test_36_wishes_that_leave_no_token_to_draw(mill: Mill, unharmed: None, cut: str) -> None:
    (brace,) = mill.client.post("/tokenize", json={"prompt": "}"}).json()["tokens"]
    nothing = {"guided_choice": ["}"], "stop_token_ids": [brace], "min_tokens": 1}
    extremes = [{"temperature": 1e-39}, {"temperature": 1e-45}, {"repetition_penalty": 1e-38}]
    for wishes in (nothing, *extremes):
        body = COMPLETIONS.body("hi", max_tokens=3) | wishes | {cut: 0.9}
        response = post(mill.client, COMPLETIONS, body)
        assert response.status_code in (200, 400), (wishes, response.text)


def test_36_odd_types_are_refused(mill: Mill, unharmed: None) -> None:
    for odd in ([{"type": [{}]}], [{"type": {}}], [{"type": 1e999}], [[]], [None]):
        for path, field in (("/v1/responses", "input"), ("/v1/conversations", "items")):
            content = str({field: odd}).replace("'", '"').replace("inf", "1e999")
            content = content.replace("None", "null")
            response = mill.client.post(path, content=content.encode())
            assert response.status_code == 400, (path, odd, response.text)
            assert RESPONSES.error(response)


ENDLESS: dict[str, Any] = LONG | {"ignore_eos": True, "cache_salt": "39"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LARGE: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "mill " * 800_000}),
    "conversation": (CHAT, CHAT.body("mill " * 800_000)),
    "grammar": (
        COMPLETIONS,
        {"guided_grammar": "root ::= " + " | ".join(f'"{n} mills"' for n in range(30_000))},
    ),
    "choices": (COMPLETIONS, {"guided_choice": [f"{n} mills" for n in range(20_000)]}),
    "pattern": (COMPLETIONS, {"guided_regex": "(x{1000}){1000}"}),
    "schema": (
        CHAT,
        CHAT.body(
            "hi",
            schema={
                "type": "object",
                "properties": {f"{a}{b}{c}": {"enum": [a, b, c]} for a in LETTERS for b in LETTERS
                               for c in "xyz"},
            },
        ),
    ),
}  # fmt: skip


def _flows(longest: Callable[[], tuple[float, float]]) -> None:
    """Whether no gap is the most part of the time, in one of a few tries: any process may stall once."""
    seen = []
    for _ in range(5):
        seen.append(longest())
        gap, whole = seen[-1]
        if gap < max(1, whole / 2):
            return
    raise AssertionError(seen)


@pytest.mark.parametrize("what", LARGE)
def test_39_size_does_not_lengthen_the_gaps_of_others(mill: Mill, what: str) -> None:
    endpoint, large = LARGE[what]
    body = endpoint.body("hi", **SHORT) | large

    def longest() -> tuple[float, float]:
        with beside(mill.client, COMPLETIONS, COMPLETIONS.body("Once", **ENDLESS)) as stream:
            begin = time.monotonic()
            response = post(mill.client, endpoint, body)
            end = time.monotonic()
            stream.move()
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 200 or endpoint.error(response)
        return stream.longest_gap(begin, end), end - begin

    _flows(longest)
    assert mill.idle()


def test_39_slow_readers_do_not_lengthen_them(mill: Mill) -> None:
    chatty = CHAT.body("hi", **LONG) | {"stream": True, "logprobs": True, "top_logprobs": 20}

    def longest() -> tuple[float, float]:
        with beside(mill.client, COMPLETIONS, COMPLETIONS.body("Once", **ENDLESS)) as stream:
            readers = [mill.send(CHAT.path, chatty) for _ in range(3)]
            assert until(lambda: len(mill.requests) == 4)
            begin = time.monotonic()
            stream.move(300)
            end = time.monotonic()
            for reader in readers:
                reader.close()
        return stream.longest_gap(begin, end), end - begin

    _flows(longest)
    assert mill.idle()


def test_every_endpoint_has_its_numbers() -> None:
    assert set(FIELDS) == set(ALL)
