"""Tokenize, detokenize and what SGLang's clients ask about the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Server

from millrace.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(default_model)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_there_and_back(server: Server, tokenizer: Tokenizer, prefix: str) -> None:
    text = "A café 😀 at 10"
    answer = server.post(f"{prefix}/tokenize", {"prompt": text}).json()
    tokens = tokenizer.encode(text, special=True)
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": 8192}
    back = server.post(f"{prefix}/detokenize", {"tokens": tokens}).json()
    assert back == {"text": text, "prompt": text}
    several = server.post(f"{prefix}/tokenize", {"prompt": ["a b", text]}).json()
    assert several["count"] == [2, len(tokens)] and several["tokens"][1] == tokens
    lists = server.post(f"{prefix}/detokenize", {"tokens": several["tokens"]}).json()
    assert lists["text"] == ["a b", text]


@pytest.mark.parametrize(
    ("path", "more"),
    [("/tokenize", {}), ("/v1/tokenize", {}), ("/v1/chat/completions", {"max_tokens": 1})],
)
def test_an_answer_cannot_both_go_on_and_begin(
    server: Server, path: str, more: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2"}]
    body = {"messages": messages, "continue_final_message": True, **more}
    for said in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        assert server.post(path, body | said).status_code == 200
    refused = server.post(path, body | {"add_generation_prompt": True})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "continue_final_message"
    assert "add_generation_prompt" in error["message"]


def test_messages_are_rendered_as_chat_does(server: Server, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"messages": HELLO, "return_token_strs": True}
    answer = server.post("/tokenize", body).json()
    text = tokenizer.decode(answer["tokens"], skip_special=False)
    assert text.endswith("<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n")
    assert "".join(answer["token_strs"]) == text
    chat = server.post(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, "temperature": 0}
    ).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    bare = server.post("/tokenize", body | {"add_generation_prompt": False}).json()
    assert answer["tokens"][: bare["count"]] == bare["tokens"]
    with_tools = server.post("/tokenize", body | {"tools": [TOOL]}).json()
    assert "weather" in tokenizer.decode(with_tools["tokens"])


def test_special_tokens(server: Server, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|im_end|>")
    assert server.post("/detokenize", {"tokens": end}).json()["text"] == ""
    shown = server.post("/detokenize", {"tokens": end, "skip_special_tokens": False}).json()
    assert shown["text"] == "<|im_end|>"
    assert server.post("/detokenize", {"tokens": []}).json()["text"] == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": HELLO}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}),
        ("/tokenize", {"prompt": 7}),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ x }}"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [1, [2]]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
def test_bad_input(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_what_the_server_is(server: Server) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = server.http.get(f"{path}").json()
        assert info["served_model_name"] == "smollm2" and info["is_generation"] is True
        assert Path(info["model_path"]).is_dir()
    info = server.http.get("/get_server_info").json()
    assert info["context_length"] == 8192 and info["status"] == "ready"
    assert server.http.get("/get_model_info?model=nope").status_code == 404


def test_flushing(server: Server) -> None:
    own = {"sec-fetch-site": "same-origin"}
    for response in (
        server.http.get("/flush_cache", headers=own),
        server.post("/flush_cache", {}),
    ):
        assert response.status_code == 200
        assert "cache" in response.text.lower()
