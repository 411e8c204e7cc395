"""What one client sends or leaves unread is not felt by the others: large prompts, grammars, readers
that stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api import tiny_folder
from conftest import PATIENCE, Server, until

READER_TIMEOUT = 3


@pytest.fixture(scope="module")
def tiny(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("tiny"), default_model)
    server = Server(
        str(folder),
        "--max-running",
        "8",
        "--reader-timeout",
        str(READER_TIMEOUT),
    )
    yield server.wait_ready()
    server.stop()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads come and go
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def workers(server: Server) -> list[int]:
    found = []
    for pid in children(server.process.pid):
        with contextlib.suppress(OSError):  # they come and go
            if b"millrace.text.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def refused(answer: Any, code: str) -> str:
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert error["code"] == code
    return str(error["message"])


LARGE = "Some words of a very long book. " * 320_000
"""Ten megabytes."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LARGE}]}),
        ("/v1/completions", {"prompt": LARGE}),
        ("/v1/responses", {"input": LARGE}),
        ("/generate", {"text": LARGE}),
    ],
)
def test_ten_megabytes_are_refused_by_their_length(
    tiny: Server, path: str, body: dict[str, Any]
) -> None:
    message = refused(tiny.post(path, body), "context_length_exceeded")
    assert "at least" in message and str(tiny_folder.WINDOW) in message


def test_what_may_fit_is_counted_in_a_worker_and_exactly(tiny: Server) -> None:
    text = "Some words of a long chapter. " * 10_000
    counted = tiny.post("/tokenize", {"prompt": text}).json()["count"]
    message = refused(tiny.post("/v1/completions", {"prompt": text}), "context_length_exceeded")
    assert f"is {counted} tokens long" in message
    assert workers(tiny)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    answer = tiny.post("/v1/messages/count_tokens", {"model": "x", **body})
    assert answer.status_code == 404
    name = tiny.http.get("/v1/models").json()["data"][0]["id"]
    answer = tiny.post("/v1/messages/count_tokens", {"model": name, **body})
    assert answer.json()["input_tokens"] > counted


def test_a_large_conversation_is_answered_as_a_small_one_is(tiny: Server) -> None:
    """The same prompt, by way of a worker and without one."""
    said = {"role": "user", "content": "word " * 6000}
    padded = {"messages": [said], "chat_template_kwargs": {"unused": "x" * 100_000}}
    small = {"messages": [said]}
    answers = [
        tiny.post("/v1/chat/completions", body | {"max_tokens": 8, "temperature": 0}).json()
        for body in (small, padded)
    ]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_health_answers_and_streams_flow_while_a_large_prompt_is_read(tiny: Server) -> None:
    """In one of a few tries: what asks may stall while the prompt is read."""
    turns = [turns_of_the_loop(tiny, "Some words of a long chapter. " * 20_000)]
    while turns[-1] <= 3 and len(turns) < 5:
        turns.append(turns_of_the_loop(tiny, "Some words of a long chapter. " * 20_000))
    assert turns[-1] > 3, "the loop did not turn while the prompt was read"


def turns_of_the_loop(tiny: Server, text: str) -> int:
    """How often health is told, and a stream goes on, while a text that may fit is counted."""
    body = {"prompt": "Go on.", "max_tokens": 6000, "stream": True, "ignore_eos": True}
    with tiny.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        sender = socket.create_connection(("127.0.0.1", tiny.port))
        sender.sendall(raw_post("/tokenize", {"prompt": [text] * 2}))
        answered = 0
        while not readable(sender):
            assert tiny.http.get("/health").status_code == 200
            next(lines, None)
            answered += 1
        sender.close()
    return answered


def test_a_worker_that_is_killed_is_replaced(tiny: Server) -> None:
    text = "Some words of a long chapter. " * 10_000
    before = tiny.post("/tokenize", {"prompt": text}).json()["count"]
    for pid in workers(tiny):
        os.kill(pid, signal.SIGKILL)
    assert tiny.post("/tokenize", {"prompt": text}).json()["count"] == before


def test_workers_end_with_the_server(default_model: Path, tmp_path: Path) -> None:
    server = Server(str(tiny_folder.make(tmp_path, default_model))).wait_ready()
    try:
        server.post("/tokenize", {"prompt": "words " * 20_000})
        (pid,) = workers(server)
    finally:
        server.stop()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("part", ["{}", "[]", '"x"'])
def test_a_body_of_countless_values_is_refused(tiny: Server, part: str) -> None:
    body = '{"prompt": [' + ",".join([part] * 2_100_000) + "]}"
    message = refused(tiny.http.post("/v1/completions", content=body.encode()), "invalid_request")
    assert "more than" in message


CHOICES = [f"item number {i} of the list" for i in range(20_000)]


def test_twenty_thousand_choices_are_a_choice_of_one(tiny: Server) -> None:
    body = {"prompt": "Which?", "guided_choice": CHOICES, "max_tokens": 40}
    answer = tiny.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] in CHOICES


def test_a_grammar_of_thirty_thousand_alternatives_is_refused(tiny: Server) -> None:
    grammar = "root ::= " + " | ".join(f'"item {i} of the list"' for i in range(30_000))
    message = refused(
        tiny.post("/v1/completions", {"prompt": "?", "guided_grammar": grammar}),
        "invalid_request",
    )
    assert "alternatives" in message


def test_repetitions_of_repetitions_are_followed(tiny: Server) -> None:
    body = {"prompt": "x", "guided_regex": "(x{1000}){1000}", "max_tokens": 16}
    answer = tiny.post("/v1/completions", body).json()
    assert set(answer["choices"][0]["text"]) == {"x"}


@pytest.mark.parametrize(
    "demand",
    [
        {"guided_json": {"type": "object", "required": "😀" * 200}},
        {"guided_json": {"type": "object", "required": {}}},
        {"guided_regex": "x" * 2_000_000},
        {"guided_regex": "("},
        {"guided_grammar": "root ::= root2"},
        {"guided_grammar": "start: " + "(" * 3000},
        {"guided_choice": ["x" * 2_000_000]},
        {"guided_json": {"enum": ["x" * 2_000_000]}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"required": "😀" * 99}},
            }
        },
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_grammars_that_cannot_be_used_are_the_requests_fault(
    tiny: Server, demand: dict[str, Any], path: str
) -> None:
    body = demand | {"prompt": "?", "messages": [{"role": "user", "content": "?"}]}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    refused(tiny.post(path, body), "invalid_request")


def test_a_tool_whose_schema_makes_the_compiler_panic_is_refused(tiny: Server) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "required": "😀" * 200}}
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
    }
    assert tiny.post("/v1/chat/completions", body).status_code == 400


def test_readers_that_stop_are_let_go_and_the_others_go_on(tiny: Server) -> None:
    stopped = [slow_reader(tiny, max_tokens=8000) for _ in range(4)]
    try:
        until(lambda: len(tiny.status()["requests"]) == 4, 10)
        body = {"prompt": "Go on.", "max_tokens": 64, "ignore_eos": True}
        assert tiny.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 64
        # Those rows end: by the reader's silence, or before it, by their length.
        assert until(lambda: tiny.status()["requests"] == [])
    finally:
        for reader in stopped:
            reader.close()


def test_a_reader_that_comes_back_in_time_misses_nothing(tiny: Server) -> None:
    """In one of a few tries: on a machine that stalls, it may come back too late."""
    for _ in range(5):
        received = read_after_a_pause(tiny)
        if b"[DONE]" in received:
            break
    assert b"[DONE]" in received, "the connection ended early"
    events = [
        json.loads(line[6:])
        for line in dechunked(received).splitlines()
        if line.startswith(b"data: {")
    ]
    scored = [len((c["logprobs"] or {}).get("tokens", [])) for e in events for c in e["choices"]]
    assert sum(scored) == 1500


def read_after_a_pause(tiny: Server) -> bytes:
    received = b""
    with slow_reader(tiny, max_tokens=1500, logprobs=5) as reader:
        time.sleep(1)
        reader.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while b"[DONE]" not in received and (part := reader.recv(1 << 16)):
                received += part
    return received


def raw_post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def readable(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


def slow_reader(server: Server, **body: Any) -> socket.socket:
    """A client that asks for a stream and does not read it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    wanted = {"prompt": "Go on.", "stream": True, "ignore_eos": True, "logprobs": 5} | body
    connection.sendall(raw_post("/v1/completions", wanted))
    return connection


def dechunked(data: bytes) -> bytes:
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"chunked" in head
    found = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16) if size else 0
        found += rest[:length]
        rest = rest[length + 2 :]
    return found
