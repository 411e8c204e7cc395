"""Limits of single keys and models in the configuration file, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import Server, until

TOML = """
api_key_file = "{folder}/keys"
rate_requests = 1000

[models.free]
model = "{folder}/tiny"
max_running = 3
max_queue = 0
max_tokens = 30

[models.narrow]
model = "{folder}/tiny"
max_prompt_tokens = 20
max_answer_tokens = 8

[models.seldom]
model = "{folder}/tiny"
rate_requests = 2

[models.dear]
model = "{folder}/tiny"
rate_tokens = 6

[keys.ann]
rate_requests = 4
max_answer_tokens = 10

[keys.eve]
key = "sk-eve"
max_running = 1

[keys.dan]
key = "sk-dan"
max_answer_tokens = 10

[keys.bob]
key = "sk-bob"
max_prompt_tokens = 12
"""
SHORT = {"model": "free", "prompt": "Once", "max_tokens": 2, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 7000, "stream": True}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("quotas")
    tiny_folder.make(folder / "tiny", default_model)
    (folder / "keys").write_text("ann:sk-ann\ncat:sk-cat\nroot[admin]:sk-root\n")
    file = folder / "millrace.toml"
    file.write_text(TOML.format(folder=folder))
    running = Server("free", "--config", str(file)).wait_ready()
    yield running
    running.stop()


def _ask(server: Server, key: str, body: Any, path: str = "/v1/completions") -> httpx.Response:
    return server.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def _told(server: Server, key: str) -> dict[str, Any]:
    answer = server.http.get("/v1/key", headers={"authorization": f"Bearer {key}"})
    return dict(answer.json()["limits"])


@contextmanager
def _running(server: Server, key: str) -> Iterator[None]:
    headers = {"authorization": f"Bearer {key}"}
    with server.http.stream("POST", "/v1/completions", json=LONG, headers=headers) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # the response is closed with it
        next(lines)
        yield


def test_a_key_has_a_rate_of_its_own_and_others_have_the_servers(limited: Server) -> None:
    first = _ask(limited, "sk-ann", SHORT)
    assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "4"
    answers = [_ask(limited, "sk-ann", SHORT) for _ in range(8)]
    refused = answers[-1]
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert "4 requests per minute" in error["message"]
    assert "rate_requests in [keys.ann]" in error["message"]
    other = _ask(limited, "sk-cat", SHORT)
    assert other.status_code == 200 and other.headers["x-ratelimit-limit-requests"] == "1000"
    told = _told(limited, "sk-ann")
    assert (told["rate_requests"], told["max_answer_tokens"]) == (4, 10)
    assert told["remaining_requests"] == 0


def test_a_key_may_have_so_many_answers_at_a_time(limited: Server) -> None:
    assert _told(limited, "sk-eve")["running"] == 0
    with _running(limited, "sk-eve"):
        refused = _ask(limited, "sk-eve", SHORT)
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert "max_running in [keys.eve]" in refused.json()["error"]["message"]
        messages = {
            "model": "free",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "x"}],
        }
        anthropic = _ask(limited, "sk-eve", messages, "/v1/messages")
        assert anthropic.status_code == 429
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        assert _ask(limited, "sk-cat", SHORT).status_code == 200, "others are not held up"
        assert _told(limited, "sk-eve")["running"] == 1
    assert until(lambda: _told(limited, "sk-eve")["running"] == 0)
    several = SHORT | {"n": 3}
    assert _ask(limited, "sk-eve", several).status_code == 200, "one request is served by itself"
    assert until(lambda: _told(limited, "sk-eve")["running"] == 0)
    assert _ask(limited, "sk-eve", SHORT | {"n": 200}).status_code in (400, 429)
    assert _told(limited, "sk-eve")["running"] == 0, "what is refused is not counted"


@pytest.mark.parametrize(
    ("key", "model", "most", "table"),
    [("sk-bob", "free", 12, "keys.bob"), ("sk-cat", "narrow", 20, "models.narrow")],
)
def test_prompts_have_a_limit(limited: Server, key: str, model: str, most: int, table: str) -> None:
    def ask(tokens: int) -> httpx.Response:
        return _ask(limited, key, {"model": model, "prompt": [5] * tokens, "max_tokens": 1})

    assert ask(most).status_code == 200
    error = ask(most + 1)
    assert error.status_code == 400
    told = error.json()["error"]
    assert told["code"] == "context_length_exceeded"
    assert f"{most + 1} tokens long" in told["message"]
    assert f"max_prompt_tokens in [{table}]" in told["message"]
    long = {"role": "user", "content": "many words " * 40}
    body = {"model": model, "max_tokens": 1, "messages": [long]}
    anthropic = _ask(limited, key, body, "/v1/messages")
    assert anthropic.status_code == 400
    assert f"> {most} maximum" in anthropic.json()["error"]["message"]


def test_answers_have_a_limit(limited: Server) -> None:
    body = {"model": "narrow", "prompt": "Once", "ignore_eos": True}
    refused = _ask(limited, "sk-cat", body | {"max_tokens": 9})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "max_tokens"
    assert "max_answer_tokens in [models.narrow]" in error["message"]
    for said, made in (({"max_tokens": 8}, 8), ({}, 8), ({"max_tokens": 3}, 3)):
        answer = _ask(limited, "sk-cat", body | said).json()
        assert answer["usage"]["completion_tokens"] == made
    generate = {"model": "narrow", "text": "Once"}
    for said, status in (({}, 200), ({"max_new_tokens": 129}, 400), ({"max_new_tokens": 8}, 200)):
        sampling = {"sampling_params": {"ignore_eos": True} | said}
        generated = _ask(limited, "sk-cat", generate | sampling, "/generate")
        assert generated.status_code == status
        if status == 200:
            assert generated.json()["meta_info"]["completion_tokens"] == 8
    chat = {"model": "narrow", "messages": [{"role": "user", "content": "x"}], "stream": False}
    options = {"options": {"num_predict": 50}}
    assert _ask(limited, "sk-cat", chat | options, "/api/chat").status_code == 400


def test_a_limit_of_answers_cuts_a_default(limited: Server) -> None:
    """`max_tokens = 30` of the model is no word of the caller's: it is not refused for it."""
    body = {"model": "free", "prompt": "Once", "ignore_eos": True}
    made = {
        key: _ask(limited, key, body).json()["usage"]["completion_tokens"]
        for key in ("sk-cat", "sk-dan")
    }
    assert made == {"sk-cat": 30, "sk-dan": 10}


def test_a_model_has_a_rate_for_all_callers_together(limited: Server) -> None:
    body = SHORT | {"model": "seldom"}
    assert _ask(limited, "sk-bob", body | {"prompt": ["a", "b", "c"]}).status_code == 400
    assert [_ask(limited, key, body).status_code for key in ("sk-cat", "sk-root")] == [200, 200]
    refused = _ask(limited, "sk-bob", body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert "rate_requests in [models.seldom]" in refused.json()["error"]["message"]
    dear = SHORT | {"model": "dear", "max_tokens": 6}
    assert _ask(limited, "sk-cat", dear).status_code == 200
    over = _ask(limited, "sk-root", dear)
    assert over.status_code == 429
    assert "rate_tokens in [models.dear]" in over.json()["error"]["message"]


def test_a_model_has_its_own_places_and_tells_its_limits(limited: Server) -> None:
    headers = {"authorization": "Bearer sk-root"}
    told = limited.http.get("/server_info", params={"model": "free"}, headers=headers).json()
    assert (told["max_running_requests"], told["max_queued_requests"]) == (3, 0)
    cards = limited.http.get("/v1/models", headers=headers).json()["data"]
    profiles = {card["id"]: card["profile"] for card in cards}
    assert profiles["narrow"] == {"max_prompt_tokens": 20, "max_answer_tokens": 8}
    assert profiles["free"]["max_queue"] == 0 and profiles["seldom"] == {"rate_requests": 2}
