"""The table of stop sequences for chat and completions, streamed and whole, with SmolLM2's own ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Server

from millrace.text.tokenizer import Tokenizer

CHAT = {
    "messages": [{"role": "user", "content": "Count 1-10"}],
    "guided_regex": "(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)",
}
RAW = {"prompt": "1\n2\n3\n4\n"}
SHAPES = [("/v1/chat/completions", CHAT), ("/v1/completions", RAW)]


@pytest.fixture(scope="module")
def ids(default_model: Path) -> dict[str, int]:
    tokenizer = Tokenizer(default_model)
    return {digit: tokenizer.encode(digit)[0] for digit in "56"}


def _ask(server: Server, path: str, body: dict[str, Any], **more: Any) -> tuple[str, str, Any]:
    asked = {"max_tokens": 200, "temperature": 0} | body | more
    choice = server.post(path, asked).json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    whole = text, choice["finish_reason"], choice["matched_stop"]
    pieces, last = "", None
    with httpx.stream(
        "POST", f"{server.url}{path}", json=asked | {"stream": True}, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])["choices"][0]
                pieces += last["text"] if "text" in last else last["delta"].get("content") or ""
    assert last is not None
    assert (pieces, last["finish_reason"], last["matched_stop"]) == whole
    return whole


@pytest.mark.parametrize(("path", "body"), SHAPES, ids=["chat", "completions"])
def test_the_table(server: Server, path: str, body: dict[str, Any], ids: dict[str, int]) -> None:
    text, finish, matched = _ask(server, path, body, stop=["6"])
    assert (finish, matched) == ("stop", "6")
    assert "5" in text and "6" not in text
    text, finish, matched = _ask(server, path, body, stop_token_ids=[ids["5"], ids["6"]])
    assert (finish, matched) == ("stop", ids["5"])
    text, finish, matched = _ask(server, path, body, stop=["5"], stop_token_ids=[ids["6"]])
    assert (finish, matched) == ("stop", "5")
    text, finish, matched = _ask(server, path, body, stop="6", include_stop_str_in_output=True)
    assert text.endswith("6") and matched == "6"


def test_a_stop_of_several_tokens_across_their_borders(server: Server) -> None:
    text, finish, matched = _ask(server, *SHAPES[0], stop=["hello world", "6, 7"])
    assert (finish, matched) == ("stop", "6, 7")
    assert text.endswith("5, ")
    text, finish, matched = _ask(server, *SHAPES[0], stop=["6, 7, 8", "6, 7", "7"])
    assert matched == "6, 7, 8", "the earliest wins, the longest of those that begin there"


@pytest.mark.parametrize(("path", "body"), SHAPES, ids=["chat", "completions"])
def test_what_is_no_stop(server: Server, path: str, body: dict[str, Any]) -> None:
    for stop in ("", [""], ["a"] * 65, 7):
        response = server.post(path, body | {"stop": stop})
        assert response.status_code == 400
        assert "stop" in response.json()["error"]["param"]


def test_an_end_token_is_no_matched_stop(server: Server) -> None:
    text, finish, matched = _ask(server, *SHAPES[0], stop=["never"])
    assert (finish, matched) == ("stop", None)
    assert text.endswith("10")
