"""Bad input: a clear error in OpenAI's shape each time, and a server that is up afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Server

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _still_up(server: Server) -> Any:
    yield
    assert server.health()["status"] == "ready"


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "max_tokens": -1}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"messages": HELLO, "temperature": -0.1}, "temperature"),
        ({"messages": HELLO, "top_p": 1.5}, "top_p"),
        ({"messages": HELLO, "n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": HELLO, "logit_bias": {"2": 1, "02": 2}}, "logit_bias"),
    ],
)
def test_a_bad_field_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    assert _error(server.post("/v1/chat/completions", body), 400)["param"] == param


def test_a_field_that_asks_for_nothing_is_no_reason_to_refuse(server: Server) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 1,
        "frequency_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "novel_field": 1,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200
    assert response.headers["x-millrace-ignored"] == "novel_field"


@pytest.mark.parametrize("name", [" ", " a", "a ", "", "\t", "\u00e9 ", "a\r\nb: c"])
def test_unknown_fields_may_have_names_that_no_header_could_hold(server: Server, name: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = server.post(path, body | {name: 1})
        assert response.status_code == 200 and response.headers["x-millrace-ignored"]


def test_an_unknown_model_names_those_there_are(server: Server) -> None:
    error = _error(server.post("/v1/chat/completions", {"model": "x", "messages": HELLO}), 404)
    assert error["code"] == "model_not_found"
    assert "smollm2" in error["message"]


def test_a_body_over_the_limit(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    response = server.http.post("/v1/completions", content=body)
    assert _error(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1]", b'"x"', b'{"prompt": "\xff\xfe"}', b"[" * 5000, b'{"a": 1} x']
)
def test_invalid_json_and_utf8(server: Server, body: bytes) -> None:
    _error(server.http.post("/v1/completions", content=body), 400)


def test_a_prompt_over_the_window_gives_both_numbers(server: Server) -> None:
    error = _error(server.post("/v1/completions", {"prompt": "word " * 9000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    assert any(int(n) > 9000 for n in error["message"].split() if n.isdigit())


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "x"], [10**9], [-1], [True], {"a": 1}, None])
def test_bad_prompts(server: Server, prompt: Any) -> None:
    _error(server.post("/v1/completions", {"prompt": prompt}), 400)


def test_unknown_paths_and_methods(server: Server) -> None:
    _error(server.http.get("/nothing"), 404)
    _error(server.http.get("/v1/chat/completions"), 405)


def _serve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace", "serve", *args],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_port_in_use_is_told_at_once(server: Server) -> None:
    ended = _serve("--port", str(server.port))
    assert ended.returncode == 1
    assert "--port" in ended.stderr


def test_a_model_folder_with_a_missing_file(tmp_path: Path, default_model: Path) -> None:
    for file in default_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    ended = _serve(str(tmp_path), "--port", "0")
    assert ended.returncode == 1
    assert "safetensors" in ended.stderr


def test_weights_that_do_not_fit_the_config(tmp_path: Path, default_model: Path) -> None:
    for file in default_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = _serve(str(tmp_path), "--port", "0")
    assert ended.returncode == 1
    assert "cannot be loaded" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_a_corrupt_gguf(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    ended = _serve(str(file), "--port", "0")
    assert ended.returncode == 1
    assert "broken.gguf" in ended.stderr.replace("\n", "")
