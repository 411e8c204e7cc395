"""Structured output on the real model: what ends validates, streamed too, and neighbours are left alone.

MILLRACE_HEAVY=1 (`make test-heavy`) runs 200 schemas; without it a sample.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from conftest import Server
from schemas import schema

COUNT = 200 if os.environ.get("MILLRACE_HEAVY") else 8


def _body(seed: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Describe thing {seed} as JSON."}],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 90,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": schema(seed)},
        },
        **more,
    }


def _whole(server: Server, seed: int) -> tuple[str, str]:
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=_body(seed), timeout=600)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def _streamed(server: Server, seed: int) -> tuple[list[str], str]:
    pieces, finish = [], ""
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=_body(seed, stream=True), timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces += [p] if (p := choice["delta"].get("content")) else []
                finish = choice["finish_reason"] or finish
    return pieces, finish


def _valid(text: str, finish: str, seed: int) -> bool:
    if finish == "length":
        return False
    assert finish == "stop"
    jsonschema.validate(json.loads(text), schema(seed))
    return True


def test_every_answer_validates_or_is_cut_by_length(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        whole = list(pool.map(lambda s: _whole(server, s), range(COUNT)))
        streamed = list(pool.map(lambda s: _streamed(server, s), range(COUNT)))
    ended = sum(_valid(text, finish, seed) for seed, (text, finish) in enumerate(whole))
    assert ended > COUNT // 2
    for (text, finish), (pieces, streamed_finish) in zip(whole, streamed, strict=True):
        assert ("".join(pieces), streamed_finish) == (text, finish)
        assert len(pieces) > 1


def test_plain_requests_beside_structured_ones_are_unchanged(server: Server) -> None:
    def plain(seed: int) -> str:
        body = {"prompt": f"Number {seed} is", "temperature": 0.8, "seed": seed, "max_tokens": 16}
        return str(server.post("/v1/completions", body).json()["choices"][0]["text"])

    alone = [plain(s) for s in range(4)]
    with ThreadPoolExecutor(8) as pool:
        guided = [pool.submit(_whole, server, s) for s in range(4)]
        beside = list(pool.map(plain, range(4)))
        assert beside == alone
        for seed, work in enumerate(guided):
            _valid(*work.result(), seed)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_regex", "[a-c]{3}-[0-9]{2}", r"^[a-c]{3}-[0-9]{2}$"),
        ("guided_choice", ["yes", "no", "maybe"], r"^(yes|no|maybe)$"),
        ("guided_grammar", 'root ::= ("x" | "y") "!"', r"^[xy]!$"),
        ("guided_json", {"type": "integer", "minimum": 3, "maximum": 5}, r"^[345]$"),
        ("guided_json", {"type": "int", "minimum": 3, "maximum": 5}, r"^[345]$"),
    ],
)
def test_the_guided_family(server: Server, field: str, value: Any, pattern: str) -> None:
    import re

    for path, body in (
        ("/v1/completions", {"prompt": "Answer: "}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Answer."}]}),
    ):
        asked = body | {field: value, "temperature": 1.0, "seed": 3, "max_tokens": 24}
        choice = server.post(path, asked).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.match(pattern, text.strip()), text
        assert choice["finish_reason"] == "stop"


def test_json_object_is_an_object(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Give me a tiny JSON object."}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 120,
    }
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("format", "word"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "not"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        ({"type": "poem"}, "poem"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    server: Server, format: dict[str, Any], word: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": format}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_seeds_differ_where_the_temperature_is_the_models_own(server: Server) -> None:
    """Its 0.2 leaves little to choose from, so that not every two seeds do."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    form = {"type": "object", "properties": properties, "required": list(properties)}
    body = {
        "messages": [{"role": "user", "content": "Give me a person."}],
        "max_tokens": 40,
        "json_schema": form | {"additionalProperties": False},
    }

    def texts(**more: Any) -> list[str]:
        answers = [server.post("/v1/chat/completions", body | more | {"seed": s}) for s in range(3)]
        return [a.json()["choices"][0]["message"]["content"] for a in answers]

    drawn = texts()
    assert drawn == texts(temperature=0.2, top_p=0.9), "what the model's authors recommend"
    assert len(set(drawn)) > 1
    assert len(set(texts(temperature=1.0, top_p=1.0))) == 3
    assert len(set(texts(temperature=0))) == 1
