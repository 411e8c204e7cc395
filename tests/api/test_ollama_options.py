"""Ollama's options on a tiny model, and requests that cannot be carried out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, until

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    model = tiny_folder.make(tmp_path_factory.mktemp("options") / "tiny", default_model)
    running = Server(str(model), "--keep-alive", "0.05").wait_ready()
    yield running
    running.stop()


def _generated(server: Server, **options: Any) -> dict[str, Any]:
    body = {"prompt": "Once", "raw": True, "stream": False}
    response = server.post("/api/generate", body | {"options": {"num_predict": 8} | options})
    assert response.status_code == 200, response.text
    return {**response.json(), "ignored": response.headers.get("x-millrace-ignored")}


def test_sampling_options_have_their_effect(tiny: Server) -> None:
    greedy = _generated(tiny, temperature=0)
    assert greedy["done_reason"] == "length" and greedy["eval_count"] == 8
    text = greedy["response"]
    for same in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert _generated(tiny, temperature=1.0, **same)["response"] == text
    drawn = _generated(tiny, temperature=1.0, seed=7)["response"]
    assert _generated(tiny, temperature=1.0, seed=7)["response"] == drawn
    assert _generated(tiny, temperature=1.0, seed=8)["response"] != drawn
    assert _generated(tiny, temperature=1.0, seed=-1)["response"]
    assert _generated(tiny, temperature=1.0, seed=7, typical_p=0.01)["response"] != drawn
    penalised = _generated(tiny, temperature=0, repeat_penalty=50.0)["response"]
    assert penalised != text
    assert _generated(tiny, temperature=0, repeat_penalty=50.0, repeat_last_n=0)["response"] == text
    start = text[: len(text) // 2]
    stopped = _generated(tiny, temperature=0, stop=[text[len(start) : len(start) + 2]])
    assert stopped["done_reason"] == "stop" and text.startswith(stopped["response"])


def test_what_has_no_effect_is_named(tiny: Server) -> None:
    assert _generated(tiny, repeat_last_n=64)["ignored"] is None, (
        "without a penalty it changes nothing"
    )
    assert (
        _generated(tiny, repeat_last_n=64, repeat_penalty=1.1)["ignored"] == "options.repeat_last_n"
    )
    for whole in ({"repeat_last_n": -1}, {"repeat_last_n": 4096, "num_ctx": 4096}):
        assert _generated(tiny, repeat_penalty=1.1, **whole)["ignored"] is None
    assert _generated(tiny, num_ctx=8192)["ignored"] is None
    assert _generated(tiny, num_ctx=99999)["ignored"] == "options.num_ctx"
    assert _generated(tiny, num_gpu=1, num_thread=4, num_keep=5, mirostat=0)["ignored"] is None
    assert _generated(tiny, sparkle=1)["ignored"] == "options.sparkle"
    body = {"messages": HELLO, "stream": False, "glitter": 1, "options": {"num_predict": 1}}
    response = tiny.post("/api/chat", body | {"keep_alive": "5m"})
    assert response.headers["x-millrace-ignored"] == "glitter"


def test_a_negative_limit_is_none(tiny: Server) -> None:
    for limit in (-1, -2):
        body = {"prompt": "Once", "raw": True, "options": {"num_predict": limit, "stop": ["e"]}}
        with httpx.stream(
            "POST", f"{tiny.url}/api/generate", json=body, timeout=PATIENCE
        ) as response:
            lines = [json.loads(line) for line in response.iter_lines()]
        assert lines[-1]["done"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"penalize_newline": False}}, "penalize_newline"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"options": {"num_predict": -3}}, "num_predict"),
        ({"options": {"num_predict": "many"}}, "num_predict"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": {"top_p": 2}}, "top_p"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"options": []}, "options"),
        ({"suffix": "end"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"truncate": True}, "truncate"),
        ({"shift": True}, "shift"),
        ({"width": 64}, "width"),
        ({"think": "loud"}, "think"),
        ({"format": "yaml"}, "format"),
        ({"format": {"type": "object", "minProperties": "x"}}, "format"),
        ({"context": [-1]}, "context"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_bad_input(tiny: Server, body: dict[str, Any], word: str) -> None:
    response = tiny.post("/api/generate", {"prompt": "a"} | body)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    assert word in response.json()["error"]


def test_bad_chats(tiny: Server) -> None:
    for messages in ([{"role": "wizard", "content": "a"}], "hi", [{"content": "a"}]):
        assert "error" in tiny.post("/api/chat", {"messages": messages}).json()
    picture = [{"role": "user", "content": "a", "images": ["aGk="]}]
    response = tiny.post("/api/chat", {"messages": picture})
    assert response.status_code == 400 and "images" in response.json()["error"]
    response = tiny.http.post("/api/chat", content=b"{")
    assert response.status_code == 400 and "JSON" in response.json()["error"]
    response = tiny.post("/api/generate", {"prompt": "a " * 9000, "raw": True})
    assert response.status_code == 400 and "8192" in response.json()["error"]
    assert set(tiny.http.get("/api/nothing").json()) == {"error"}


def test_an_unknown_model_is_a_404_that_names_the_others(tiny: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="tiny") as caught:
        ollama.Client(tiny.url).chat("nope", HELLO)
    assert caught.value.status_code == 404
    assert ollama.Client(tiny.url).generate(
        "tiny:latest", "a", raw=True, options={"num_predict": 1}
    )


def test_load_and_unload(tiny: Server) -> None:
    client = ollama.Client(tiny.url)
    loaded = client.generate("tiny", "")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert client.chat("tiny", []).done_reason == "load"
    response = tiny.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert response.json()["done_reason"] == "unload"
    assert client.generate("tiny", "").done_reason == "load"


def test_a_silent_stream_is_kept_alive(tiny: Server) -> None:
    """With blanks, which the real client skips; the server's idle time is short here."""
    for word in ("a ", "c ", "d "):
        body = {"prompt": word * 8100, "raw": True, "options": {"num_predict": 2}}
        url = f"{tiny.url}/api/generate"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            text = "".join(response.iter_text())
        if text.startswith(" "):
            break  # else the server slept through the whole prompt, on a machine that stalls
    assert text.startswith(" ") and "\n\n" not in text
    parts = ollama.Client(tiny.url).generate(
        "tiny", "b " * 8100, raw=True, stream=True, options={"num_predict": 2}
    )
    assert list(parts)[-1].done


LONG = {"prompt": "Once", "raw": True, "options": {"num_predict": 6000, "temperature": 0}}


def test_an_error_in_the_middle_is_a_line(tiny: Server) -> None:
    with httpx.stream(
        "POST",
        f"{tiny.url}/api/generate",
        json=LONG,
        headers={"x-request-id": "midway"},
        timeout=PATIENCE,
    ) as response:
        lines = response.iter_lines()
        json.loads(next(lines))
        assert tiny.http.delete("/v1/requests/midway").status_code == 200
        rest = [json.loads(line) for line in lines]
    assert set(rest[-1]) == {"error"}
    assert not any(r.get("done") for r in rest)


@pytest.mark.parametrize(
    ("path", "body"), [("/api/generate", LONG), ("/api/chat", LONG | {"messages": HELLO})]
)
def test_a_request_ends_when_its_time_is_over(
    tiny: Server, path: str, body: dict[str, Any]
) -> None:
    unread = {"prompt", "raw"} if path == "/api/chat" else set()
    asked = {k: v for k, v in body.items() if k not in unread} | {"stream": False}
    late = tiny.post(path, asked | {"timeout": 0.01})
    assert late.status_code == 504 and "timeout of 0.01 seconds" in late.json()["error"]
    assert until(lambda: not tiny.status()["requests"])
    assert tiny.post(path, asked | {"timeout": 0}).status_code == 400
    short = asked | {"options": {"num_predict": 2}, "timeout": 60, "priority": 1}
    response = tiny.post(path, short)
    assert response.status_code == 200 and "x-millrace-ignored" not in response.headers


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_whoever_leaves_frees_the_place(tiny: Server, stream: bool) -> None:
    with (
        httpx.Client(timeout=httpx.Timeout(PATIENCE, read=PATIENCE if stream else 0.5)) as client,
        pytest.raises(httpx.ReadTimeout) if not stream else contextlib.nullcontext(),
        client.stream("POST", f"{tiny.url}/api/generate", json=LONG | {"stream": stream}) as got,
    ):
        next(got.iter_lines())
    assert until(lambda: not tiny.status()["requests"])
