"""Cached equals cold on the default model: the same tokens, and logprobs within 1e-4."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api.cache_help import cached, chat, text
from conftest import Server

TURNS = 3
WITHIN = 1e-4


def _said(answer: dict[str, Any]) -> tuple[str, list[str], list[float]]:
    choice = answer["choices"][0]
    scores = choice["logprobs"]["content"]
    tokens = [s["token"] for s in scores]
    return choice["message"]["content"], tokens, [s["logprob"] for s in scores]


def _converse(server: Server, seed: int) -> None:
    """A random conversation; every turn is asked once more under a salt that nothing was kept for."""
    source = random.Random(seed)
    messages = [{"role": "system", "content": text(source.randrange(5, 60), seed)}]
    known = 0
    for turn in range(TURNS):
        messages.append(
            {"role": "user", "content": text(source.randrange(3, 40), 100 * seed + turn)}
        )
        wishes = {"max_tokens": source.randrange(2, 12), "logprobs": True}
        warm = chat(server, messages, cache_salt=f"cached equals cold {seed}", **wishes)
        cold = chat(server, messages, cache_salt=f"cold {seed} {turn}", **wishes)
        assert cached(warm) >= known and cached(cold) == 0
        content, tokens, scores = _said(warm)
        assert (content, tokens) == _said(cold)[:2]
        assert scores == pytest.approx(_said(cold)[2], abs=WITHIN)
        known = warm["usage"]["prompt_tokens"] - 1
        # At times the history has what was answered, at times something else.
        answer = content if source.random() < 0.5 else text(7, seed + turn)
        messages.append({"role": "assistant", "content": answer})


def test_alone(server: Server) -> None:
    _converse(server, 1)


def test_among_others_that_come_and_go(server: Server) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda seed: _converse(server, seed), (2, 3, 4)))
