"""Logprobs over HTTP against a plain forward pass of the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import Server

from millrace.text.tokenizer import Tokenizer

PROMPT = "The three largest cities of France are Paris, Marseille and Lyon — and"
MESSAGES = [{"role": "user", "content": "Name two rivers, and an emoji 😀."}]
WITHIN = 1e-4

Forward = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


@pytest.fixture
def forward(default_model: Path, tmp_path: Path) -> Forward:
    """Tokens → table of log-probabilities; row i is the distribution after token i."""

    def run(tokens: list[int]) -> np.ndarray:
        script = Path(__file__).parents[1] / "plain_forward.py"
        out = tmp_path / "tables.npz"
        subprocess.run(
            [sys.executable, str(script), str(default_model), str(out)],
            input=json.dumps([tokens]),
            text=True,
            check=True,
        )
        with np.load(out) as tables:
            return np.array(tables["arr_0"])

    return run


def _events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _choice(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def _same(left: list[float], right: list[float]) -> None:
    assert left == pytest.approx(right, abs=WITHIN)


def _token_ids(tokenizer: Tokenizer, entries: list[dict[str, Any]], row: np.ndarray) -> list[int]:
    """The tokens of chat logprobs, by their bytes."""
    vocabulary = tokenizer.vocabulary
    by_bytes = {vocabulary.bytes_of(i): i for i in range(row.shape[-1])}
    return [by_bytes[bytes(e["bytes"])] for e in entries]


def _check_chat(
    tokenizer: Tokenizer, prompt: list[int], entries: list[dict[str, Any]], forward: Forward
) -> None:
    size = np.zeros(len(tokenizer.vocabulary))
    generated = _token_ids(tokenizer, entries, size)
    table = forward([*prompt, *generated])[len(prompt) - 1 :]
    for entry, token, row in zip(entries, generated, table, strict=False):
        assert abs(entry["logprob"] - row[token]) < WITHIN
        top = entry["top_logprobs"]
        _same([t["logprob"] for t in top], sorted(row, reverse=True)[: len(top)])
        _same([t["logprob"] for t in top], [row[i] for i in _token_ids(tokenizer, top, size)])
        assert all(bytes(t["bytes"]).decode("utf-8", "replace") == t["token"] for t in top)


def _chat_prompt(default_model: Path) -> list[int]:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(default_model))
    text = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return list(theirs.encode(text, add_special_tokens=False))


def test_chat_streamed_and_whole(
    server: Server, default_model: Path, tokenizer: Tokenizer, forward: Forward
) -> None:
    # Sampling parameters change what is drawn, not what the model says of it.
    body = {
        "messages": MESSAGES,
        "max_tokens": 16,
        "temperature": 1.2,
        "seed": 5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 4,
    }
    path = "/v1/chat/completions"
    whole = _choice(server, path, body)
    entries = whole["logprobs"]["content"]
    assert len(entries) == 16
    assert {len(e["top_logprobs"]) for e in entries} == {4}
    _check_chat(tokenizer, _chat_prompt(default_model), entries, forward)

    streamed: list[dict[str, Any]] = []
    for event in _events(server, path, body):
        for choice in event["choices"]:
            streamed += (choice["logprobs"] or {"content": []})["content"]
    assert [e["bytes"] for e in streamed] == [e["bytes"] for e in entries]
    _same([e["logprob"] for e in streamed], [e["logprob"] for e in entries])


def test_chat_without_alternatives_has_only_its_own(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True}
    entries = _choice(server, "/v1/chat/completions", body)["logprobs"]["content"]
    assert [e["top_logprobs"] for e in entries] == [[], [], []]
    del body["logprobs"]
    assert _choice(server, "/v1/chat/completions", body)["logprobs"] is None


def test_completions_with_the_prompt_echoed_streamed_and_whole(
    server: Server, tokenizer: Tokenizer, forward: Forward
) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": 3,
        "echo": True,
    }
    whole = _choice(server, "/v1/completions", body)
    scores = whole["logprobs"]
    prompt = tokenizer.encode(PROMPT, special=True)
    ids = _ids_by_name(tokenizer)
    tokens = [*prompt, *(ids[name] for name in scores["tokens"][len(prompt) :])]
    assert [ids[name] for name in scores["tokens"]] == tokens
    assert len(tokens) == len(prompt) + 12

    table = forward(tokens)
    own = [float(table[i, t]) for i, t in enumerate(tokens[1:])]
    assert scores["token_logprobs"][0] is None
    _same(scores["token_logprobs"][1:], own)
    assert scores["top_logprobs"][0] is None
    for tops, row in zip(scores["top_logprobs"][1:], table, strict=False):
        assert len(tops) == 3
        _same(sorted(tops.values(), reverse=True), sorted(row, reverse=True)[:3])
        _same(list(tops.values()), [row[ids[name]] for name in tops])

    assert whole["text"].startswith(PROMPT)
    named = zip(pairwise(scores["text_offset"]), scores["tokens"], strict=False)
    assert all(
        whole["text"][a:b] == name for (a, b), name in named if not name.startswith("bytes:")
    )

    text = ""
    streamed: dict[str, list[Any]] = {key: [] for key in scores}
    for event in _events(server, "/v1/completions", body):
        for choice in event["choices"]:
            text += choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                streamed[key] += values
    assert text == whole["text"]
    assert streamed["tokens"] == scores["tokens"]
    assert streamed["text_offset"] == scores["text_offset"]
    _same(streamed["token_logprobs"][1:], own)


def test_prompt_logprobs_and_zero_alternatives(
    server: Server, tokenizer: Tokenizer, forward: Forward
) -> None:
    prompt = tokenizer.encode(PROMPT, special=True)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    choice = _choice(server, "/v1/completions", {**body, "logprobs": 0})
    table = forward(prompt)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entry, row in zip(prompt[1:], rest, table, strict=False):
        assert 2 <= len(entry) <= 3
        assert str(token) in entry
        assert all(abs(v["logprob"] - row[int(t)]) < WITHIN for t, v in entry.items())
    _same([choice["logprobs"]["token_logprobs"][0]], [float(max(table[-1]))])
    assert choice["logprobs"]["top_logprobs"] == [None, None]


def _ids_by_name(tokenizer: Tokenizer) -> dict[str, int]:
    """Token ids by the names that completions give them."""
    from millrace.api.logprobs import token_name

    vocabulary = tokenizer.vocabulary
    return {token_name(vocabulary, i): i for i in range(len(vocabulary))}
