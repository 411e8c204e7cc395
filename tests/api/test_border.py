"""Numbers and shapes from outside: honoured within their range or refused by name, on every endpoint.

Nothing that one request brings reaches the engine's memory, another request, or a status of 500.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api import tiny_folder
from conftest import PATIENCE, Server

WIDTH = 49152
HELLO = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 4}},
    "/api/chat": {"model": "tiny", "messages": HELLO, "options": {"num_predict": 4}},
    "/api/generate": {"model": "tiny", "prompt": "Once", "options": {"num_predict": 4}},
    "/detokenize": {"tokens": [1]},
}
NESTED = {"/generate": "sampling_params", "/api/chat": "options", "/api/generate": "options"}
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Server]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("border"), default_model)
    running = Server(str(folder), "--name", "tiny", "--context", "256").wait_ready()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _nothing_broke(tiny: Server) -> Iterator[None]:
    pid = tiny.status()["engine_pid"]
    yield
    status = tiny.status()
    assert (status["engine_pid"], status["restarts"], status["requests"]) == (pid, 0, [])


def _ask(tiny: Server, path: str, **fields: Any) -> httpx.Response:
    """The endpoint's plain request, with these fields where it has its parameters."""
    body = json.loads(json.dumps(BASES[path]))
    place = body
    if path in NESTED and not set(fields) & {"input_ids", "context", "priority", "text"}:
        place = body.setdefault(NESTED[path], {})
    place.update(fields)
    if "input_ids" in fields:
        body.pop("text")
    text = json.dumps(body).replace('"@1e400"', "1e400")
    return tiny.http.post(path, content=text, timeout=60)


def _refused(response: httpx.Response, name: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert name in (error if isinstance(error, str) else error["message"] + str(error.get("param")))


BAD_IDS = [WIDTH, -1, 2**31, 2**32 + 5, 2**63, 2**64, 2**70]


@pytest.mark.parametrize("id", BAD_IDS)
@pytest.mark.parametrize("path", [*OPENAI, "/generate"])
def test_stop_tokens_that_the_model_does_not_have(tiny: Server, path: str, id: int) -> None:
    name = "min_new_tokens" if path == "/generate" else "min_tokens"
    _refused(_ask(tiny, path, stop_token_ids=[5, id], **{name: 2}), "stop_token_ids")


@pytest.mark.parametrize("id", [*BAD_IDS, "9" * 5000, "x", "1.0", "²", ""])
@pytest.mark.parametrize("path", [*OPENAI, "/v1/messages", "/generate"])
def test_biases_of_tokens_that_the_model_does_not_have(tiny: Server, path: str, id: Any) -> None:
    _refused(_ask(tiny, path, logit_bias={str(id): 1.0}), "logit_bias")


@pytest.mark.parametrize("id", BAD_IDS)
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/generate", "input_ids"),
        ("/api/generate", "context"),
        ("/detokenize", "tokens"),
    ],
)
def test_prompts_of_tokens_that_the_model_does_not_have(
    tiny: Server, path: str, field: str, id: int
) -> None:
    _refused(_ask(tiny, path, **{field: [5, id]}), field)
    if path != "/api/generate":
        _refused(_ask(tiny, path, **{field: [[5], [id]]}), field)


def test_the_last_token_of_the_vocabulary_is_one(tiny: Server) -> None:
    last = WIDTH - 1
    more = {"stop_token_ids": [last], "min_tokens": 4, "logit_bias": {str(last): 100}}
    more |= {"temperature": 1, "xtc_probability": 1, "xtc_threshold": 0}
    answer = _ask(tiny, "/v1/completions", prompt=[last], **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


ODD = [
    2**63,
    2**64,
    2**70,
    -(2**70),
    10**400,
    True,
    "1",
    [1],
    {"a": 1},
    1.5,
    "@1e400",
    float("nan"),
]
NUMBERS = {
    "/v1/chat/completions": ["top_k", "min_tokens", "priority", "n", "max_tokens", "top_logprobs",
                             "max_completion_tokens", "thinking_token_budget"],
    "/v1/completions": ["top_k", "min_tokens", "priority", "n", "max_tokens", "logprobs",
                        "best_of", "prompt_logprobs"],
    "/v1/responses": ["top_k", "min_tokens", "priority", "max_output_tokens", "top_logprobs",
                      "thinking_token_budget", "max_tool_calls"],
    "/v1/messages": ["top_k", "min_tokens", "priority", "max_tokens"],
    "/generate": ["top_k", "min_new_tokens", "n", "max_new_tokens"],
    "/api/chat": ["top_k", "num_predict", "num_ctx", "repeat_last_n"],
}  # fmt: skip


@pytest.mark.parametrize("path", NUMBERS)
def test_whole_numbers_of_any_size_and_type(tiny: Server, path: str) -> None:
    for name in NUMBERS[path]:
        for value in ODD:
            answer = _ask(tiny, path, **{name: value})
            assert answer.status_code == 400, (name, value, answer.text)
            if isinstance(value, int | str) and value != "@1e400" and value != 10**400:
                _refused(answer, name)


_ALL = ["temperature", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "timeout"]  # fmt: skip
REALS = {
    **dict.fromkeys(OPENAI, _ALL),
    "/v1/messages": ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "timeout"],
    "/generate": ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"],
    "/api/chat": ["temperature", "top_p", "min_p", "typical_p", "repeat_penalty"],
}  # fmt: skip


@pytest.mark.parametrize("path", REALS)
def test_real_numbers_of_any_size_and_type(tiny: Server, path: str) -> None:
    for name in REALS[path]:
        for value in (1e300, -1e300, 2**70, -(2**70), True, "1", [1.0], {}, "@1e400", float("inf")):
            answer = _ask(tiny, path, **{name: value})
            assert answer.status_code == 400, (name, value, answer.text)


@pytest.mark.parametrize("path", [*OPENAI, "/v1/messages", "/generate", "/api/chat"])
@pytest.mark.parametrize("value", [2**64, 2**70, -(2**63) - 1, 1.5, True, "1"])
def test_seeds_beyond_64_bits(tiny: Server, path: str, value: Any) -> None:
    name = "sampling_seed" if path == "/generate" else "seed"
    _refused(_ask(tiny, path, **{name: value}), "seed")


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_numbers_that_mean_no_limit_are_honoured(tiny: Server) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    free = _text(_ask(tiny, "/v1/completions", **drawn))
    for top_k in (-1, 0, WIDTH, 2**31, 2**32, 2**63 - 1):
        assert _text(_ask(tiny, "/v1/completions", **drawn, top_k=top_k)) == free
    for most in (2**31, 2**63 - 1):
        answer = _ask(tiny, "/v1/completions", **(drawn | {"max_tokens": most}))
        assert answer.json()["usage"]["total_tokens"] == 256
        answer = _ask(tiny, "/v1/completions", **drawn, min_tokens=most)
        assert _text(answer) == free


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_gives_one_text(tiny: Server, seed: int) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": seed}
    assert _text(_ask(tiny, "/v1/completions", **drawn)) == _text(
        _ask(tiny, "/v1/completions", **drawn)
    )


@pytest.mark.parametrize("field", ["stream", "whole"])
def test_a_bad_stop_token_changes_nothing_for_the_request_beside_it(
    tiny: Server, field: str
) -> None:
    body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = _text(tiny.post("/v1/completions", body))
    with ThreadPoolExecutor(4) as pool:
        beside = pool.submit(tiny.post, "/v1/completions", body)
        hostile = {
            "stop_token_ids": [WIDTH + 7, 10**6],
            "min_tokens": 50,
            "stream": field == "stream",
        }
        others = list(pool.map(lambda _: _ask(tiny, "/v1/completions", **hostile), range(6)))
    assert [o.status_code for o in others] == [400] * 6
    assert _text(beside.result()) == alone


TINY_NUMBERS = [
    {"temperature": 1e-39, "top_p": 0.5},
    {"temperature": 5e-324, "typical_p": 0.5, "min_p": 5e-324},
    {"temperature": 1e-6, "xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"temperature": -0.0, "top_p": 5e-324},
    {"temperature": 100, "min_p": 1.0, "top_p": 5e-324, "typical_p": 5e-324},
]


@pytest.mark.parametrize("sampling", TINY_NUMBERS)
def test_tiny_numbers_are_small_and_no_more(tiny: Server, sampling: dict[str, Any]) -> None:
    assert _text(_ask(tiny, "/v1/completions", **sampling, seed=1)) is not None
    if sampling["temperature"] < 1:
        assert _text(_ask(tiny, "/v1/completions", **sampling)) == _text(
            _ask(tiny, "/v1/completions", temperature=0)
        )


@pytest.mark.parametrize("penalty", [1e-38, 1e-45, 0, -1, 1e9])
@pytest.mark.parametrize("path", [*OPENAI, "/v1/messages", "/generate"])
def test_a_repetition_penalty_out_of_its_range(tiny: Server, path: str, penalty: float) -> None:
    _refused(_ask(tiny, path, repetition_penalty=penalty, top_p=0.5), "repetition_penalty")


@pytest.mark.parametrize("filter", [{}, {"top_p": 0.5}, {"typical_p": 0.5}, {"temperature": 0}])
def test_a_grammar_goes_before_the_ban_on_stop_tokens(tiny: Server, filter: dict[str, Any]) -> None:
    """Nothing but the stop token may come, and it may not come yet: it comes."""
    (brace,) = tiny.post("/tokenize", {"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    asked = {"guided_choice": ["}"], "stop_token_ids": [brace], "min_tokens": 1, "seed": 3}
    for path in OPENAI:
        answer = _ask(tiny, path, **asked, **filter)
        assert answer.status_code == 200, answer.text
    choice = _ask(tiny, "/v1/completions", **asked, **filter).json()["choices"][0]
    assert choice["finish_reason"] == "stop"


ITEMS = [
    [{"type": [{}]}],
    [{"type": {}}],
    [{"type": 1}],
    [{"type": "message", "role": [], "content": "x"}],
    [{"type": "message", "role": {}, "content": "x"}],
    [{"role": "user", "content": [{"type": [], "text": "x"}]}],
    [{"role": "user", "content": [[]]}],
    [{"type": "function_call", "call_id": [], "name": "x", "arguments": "{}"}],
    [{"type": "function_call", "call_id": "c", "name": {}, "arguments": "{}"}],
    [{"type": "function_call", "call_id": "c", "name": "x", "arguments": "{}", "namespace": []}],
    [{"type": "function_call_output", "call_id": {}, "output": "x"}],
    [{"type": "function_call_output", "call_id": "c", "output": [{"type": {}}]}],
    [{"type": "reasoning", "summary": [{"type": [], "text": {}}]}],
    [{"type": "additional_tools", "tools": {}}],
    [{"type": "item_reference", "id": []}],
    [[]],
    [None],
]


@pytest.mark.parametrize("items", ITEMS)
def test_items_of_odd_shapes(tiny: Server, items: list[Any]) -> None:
    for path, field in (
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/conversations", "items"),
    ):
        answer = tiny.post(path, {field: items})
        assert answer.status_code == 400, (path, answer.text)


TOOLS: list[Any] = [
    [{"type": [], "name": "x"}],
    [{"type": {}, "function": {"name": "x"}}],
    [{"type": "function", "name": [], "function": {"name": []}}],
    [{"type": "function", "name": "x", "function": {"name": "x", "parameters": [1]}, "parameters": [1]}],
    [{"type": "namespace", "name": "a", "tools": [{"type": [], "name": "x"}]}],
    [{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": {}}]}],
    [{"type": "custom", "name": "x", "format": [1], "custom": {"name": "x", "format": [1]}}],
    [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": [], "definition": {}},
      "custom": {"name": "x", "format": {"type": "grammar", "grammar": {"syntax": []}}}}],
]  # fmt: skip
CHOICES: list[Any] = [
    {"type": []},
    {"type": "function", "name": []},
    {"type": "function", "name": "x", "namespace": {}},
    {"type": "allowed_tools", "mode": [], "tools": [{"type": "namespace", "name": []}]},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": {}, "name": {}}]},
]


@pytest.mark.parametrize("tools", TOOLS)
def test_tools_of_odd_shapes(tiny: Server, tools: list[Any]) -> None:
    for path in ("/v1/responses", "/v1/chat/completions"):
        answer = _ask(tiny, path, tools=tools)
        assert answer.status_code in (200, 400), (path, answer.text)


@pytest.mark.parametrize("choice", CHOICES)
def test_tool_choices_of_odd_shapes(tiny: Server, choice: Any) -> None:
    function = {"name": "x", "parameters": {"type": "object"}}
    tools = [{"type": "function", **function, "function": function}]
    for path in ("/v1/responses", "/v1/chat/completions"):
        answer = _ask(tiny, path, tools=tools, tool_choice=choice)
        assert answer.status_code in (200, 400), (path, answer.text)


ODD_BODIES = [
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a\\udc00b"}',
    b'{"\\ud800": 1}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "metadata": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
]


@pytest.mark.parametrize("body", ODD_BODIES, ids=range(len(ODD_BODIES)))
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/generate", "/api/generate", "/v1/conversations"]
)
def test_bodies_that_are_no_sound_json(tiny: Server, path: str, body: bytes) -> None:
    answer = tiny.http.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert "error" in answer.json()


def test_a_request_that_says_twice_how_long_it_is_is_the_connections_last(tiny: Server) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden)
        heard = b""
        while chunk := connection.recv(65536):
            heard += chunk
    assert heard.startswith(b"HTTP/1.1 400 ")
    assert heard.count(b"HTTP/1.1") == 1


def test_a_schema_with_numbers_beyond_64_bits_is_passed_on(tiny: Server) -> None:
    """They are the client's own business there: token amounts of some contracts have 256 bits."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 2**256}}}
    tool = {"type": "function", "function": {"name": "pay", "parameters": schema}}
    assert _ask(tiny, "/v1/chat/completions", tools=[tool]).status_code == 200
