"""Requests with thousands of prompts: bounded, counted by the rate limits, and served beside others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import Server, until

MOST = 2048
LIMIT = 60
KEYS = 6


def key(number: int) -> dict[str, str]:
    return {"authorization": f"Bearer key{number}"}


KEY = key(KEYS - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return tiny_folder.make(tmp_path_factory.mktemp("many") / "tiny", default_model)


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[Server]:
    running = Server(str(model)).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def limited(model: Path) -> Iterator[Server]:
    keys = [word for n in range(KEYS) for word in ("--api-key", f"key{n}")]
    running = Server(str(model), *keys, "--rate-requests", str(LIMIT)).wait_ready()
    yield running
    running.stop()


def refused(answer: httpx.Response, *words: str) -> dict[str, Any]:
    error = dict(answer.json()["error"])
    assert answer.status_code == 400, answer.text
    for word in words:
        assert word in error["message"]
    return error


def test_twelve_thousand_texts_are_refused_at_once(limited: Server) -> None:
    body = {"text": ["Hi"] * 12_000}
    error = refused(limited.post("/generate", body, headers=KEY), "12000", str(MOST))
    assert error["param"] == "text"
    assert limited.health()["status"] == "ready"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["Hi"] * 17, "sampling_params": {"n": 128}}),
        ("/generate", {"input_ids": [[1]] * 17, "sampling_params": [{"n": 128}] * 17}),
        ("/v1/completions", {"prompt": ["Hi"] * 17, "n": 128}),
        ("/v1/completions", {"prompt": [[1]] * 17, "best_of": 128}),
    ],
)
def test_answers_are_bounded_like_prompts(wide: Server, path: str, body: dict[str, Any]) -> None:
    refused(wide.post(path, body), str(17 * 128), str(MOST))


def test_others_are_served_while_a_list_of_the_most_begins_and_runs(wide: Server) -> None:
    answers: list[httpx.Response] = []
    sampling = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}
    body = {"text": ["Hi"] * MOST, "sampling_params": sampling}
    asking = threading.Thread(target=lambda: answers.append(wide.post("/generate", body)))
    asking.start()
    counts = [0]
    while asking.is_alive():
        assert wide.health()["status"] == "ready"
        counts.append(len(wide.status()["requests"]))
    asking.join()
    assert answers[0].status_code == 200
    found = answers[0].json()
    assert len(found) == MOST and {one["meta_info"]["completion_tokens"] for one in found} == {1}
    # They begin in slices, with others' requests in between: some were seen before all had begun.
    assert any(0 < a < b for a, b in itertools.pairwise(counts)), counts
    assert until(lambda: wide.status()["requests"] == [])


def test_a_client_that_leaves_thousands_of_prompts_frees_them_all(wide: Server) -> None:
    body = {"prompt": ["Hi"] * MOST, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with wide.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        assert len(wide.status()["requests"]) > MOST // 2
    assert until(lambda: wide.status()["requests"] == [])


def test_a_group_of_thousands_is_aborted_by_its_id(wide: Server) -> None:
    sampling = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"text": ["Hi"] * MOST, "sampling_params": sampling, "rid": "wide", "stream": True}
    with wide.http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        told = wide.post("/abort_request", {"rid": "wide"}).json()
        assert told["aborted"] > MOST // 2
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert until(lambda: wide.status()["requests"] == [])


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-requests"])


COSTS = [
    ("/tokenize", {"prompt": ["a"] * 20}),
    ("/detokenize", {"tokens": [[1]] * 20}),
    ("/v1/completions", {"prompt": ["a"] * 20, "max_tokens": 1}),
    ("/generate", {"input_ids": [[1]] * 20, "sampling_params": {"max_new_tokens": 1}}),
]


@pytest.mark.parametrize("number", range(len(COSTS)))
def test_a_request_costs_as_many_requests_as_it_has_prompts(limited: Server, number: int) -> None:
    path, body = COSTS[number]
    answer = limited.post(path, body, headers=key(number))
    assert answer.status_code == 200
    # One comes back each second.
    assert LIMIT - 20 <= remaining(answer) <= LIMIT - 10


def test_prompts_that_do_not_fit_now_wait_and_those_that_never_do_are_an_error(
    limited: Server,
) -> None:
    ask = {"prompt": ["a"] * LIMIT}
    limited.post("/tokenize", {"prompt": "a"}, headers=KEY)
    answer = limited.post("/tokenize", ask, headers=KEY)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    answer = limited.post("/tokenize", {"prompt": ["a"] * (LIMIT + 1)}, headers=KEY)
    error = refused(answer, str(LIMIT + 1), f"{LIMIT} requests per minute", "--rate-requests")
    assert error["param"] == "prompt"


def test_a_request_that_is_refused_by_its_number_is_not_tokenised(limited: Server) -> None:
    """What is no token of the model would be another error."""
    refused(limited.post("/generate", {"input_ids": [[2**30]] * 3000}, headers=KEY), str(MOST))
