"""Every request gets the sampling it asked for, whatever runs beside it, and after a crash too."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from conftest import Server

TOKENS = 12
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {"28": 4.0, "30": -100.0}},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 1, "top_k": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9},
    {"temperature": 1.3, "seed": 4, "top_k": 40},
    {"temperature": 1.5, "seed": 5, "min_p": 0.1},
    {"temperature": 1.0, "seed": 6, "typical_p": 0.8},
    {"temperature": 1.0, "seed": 7, "xtc_probability": 0.8, "xtc_threshold": 0.05},
    {"temperature": 0.9, "seed": 8, "min_tokens": TOKENS, "logit_bias": {"2": 100.0}},
    {"temperature": 1.0, "seed": 9, "presence_penalty": 2.0, "top_p": 0.95, "top_k": 50},
    {"temperature": 0.5, "seed": 10, "repetition_penalty": 0.8, "min_p": 0.02},
    {"temperature": 2.0, "seed": 11, "top_p": 0.7, "frequency_penalty": -1.0},
    {"temperature": 1.0, "seed": 2, "logit_bias": {"198": 6.0}},
]


def _complete(server: Server, parameters: dict[str, Any]) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, **parameters}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_sixteen_parameter_sets_at_once_give_what_each_gives_alone(server: Server) -> None:
    assert len(PARAMETERS) == 16
    alone = [_complete(server, p) for p in PARAMETERS]
    together = threading.Barrier(len(PARAMETERS))

    def beside_others(parameters: dict[str, Any]) -> str:
        together.wait()
        return _complete(server, parameters)

    with ThreadPoolExecutor(len(PARAMETERS)) as pool:
        assert list(pool.map(beside_others, PARAMETERS)) == alone
    assert len(set(alone)) >= 12, "the parameters matter"


def test_parameters_do_what_they_say(server: Server) -> None:
    greedy = _complete(server, {"temperature": 0})
    assert _complete(server, {"temperature": 5.0, "seed": 1, "top_k": 1}) == greedy
    assert _complete(server, {"temperature": 5.0, "seed": 1, "top_p": 1e-6}) == greedy
    assert _complete(server, {"temperature": 5.0, "seed": 1, "min_p": 1.0}) == greedy
    assert _complete(server, {"temperature": 0, "logit_bias": {"28": 100.0}}) == "," * TOKENS
    ended = {"temperature": 0, "logit_bias": {"2": 100.0}}
    assert _complete(server, ended) == ""
    assert _complete(server, {**ended, "min_tokens": TOKENS}) == greedy


def test_many_tokens_may_be_penalised_or_biased(server: Server) -> None:
    """More than a few dozen: a long prompt's, and a long list's."""
    words = " ".join(f"word{i} {chr(97 + i % 26)}{i}" for i in range(150))
    body = {"prompt": words, "max_tokens": 4, "temperature": 0}
    penalised = server.post("/v1/completions", body | {"repetition_penalty": 1e2})
    assert penalised.status_code == 200, penalised.text
    # So great a penalty bans whatever has occurred.
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert penalised.json()["choices"][0]["text"] != plain
    bias = {str(i): -100.0 for i in range(300)} | {"28": 100.0}
    assert _complete(server, {"temperature": 0, "logit_bias": bias}) == "," * TOKENS


def _stream(server: Server, seed: int, tokens: int) -> Iterator[str]:
    body = {
        "prompt": "The old lighthouse keeper",
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": seed,
        "max_tokens": tokens,
        "ignore_eos": True,
        "frequency_penalty": 0.3,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["text"]


def test_a_seed_gives_one_text_alone_in_a_batch_and_after_a_crash(
    start: Callable[..., Server],
) -> None:
    server = start().wait_ready()
    alone = "".join(_stream(server, 7, 24))
    with ThreadPoolExecutor(8) as pool:
        batch = list(pool.map(lambda seed: "".join(_stream(server, seed, 24)), range(8)))
    assert batch[7] == alone
    assert len(set(batch)) == 8

    pieces = []
    for piece in _stream(server, 7, 24):
        pieces.append(piece)
        if len(pieces) == 6:
            server.kill_engine()
    assert "".join(pieces) == alone
    server.restarted()
    assert server.status()["restarts"] == 1
    assert "".join(_stream(server, 7, 24)) == alone
