"""Engines die; streams do not notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from conftest import PATIENCE, Server, held, until

PROMPTS = ["Tell me a story.", "Describe the sea.", "Explain rain.", "Write about a fox."]


def _stream(server: Server, prompt: str, started: Callable[[], object] = lambda: None) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    text = ""
    for chunk in client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0.7,
        seed=len(prompt),
        max_tokens=32,
        stream=True,
    ):
        text += chunk.choices[0].delta.content or ""
        if text:
            started()
    return text


def test_four_streams_survive_two_kills(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    with ThreadPoolExecutor(4) as pool:
        undisturbed = list(pool.map(lambda p: _stream(server, p), PROMPTS))

    pieces = threading.Semaphore(0)
    answers: list[str] = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            answers.append(server.health()["status"])
            time.sleep(0.05)

    def heard(running: list[Future[str]]) -> bool:
        """Whether eight more pieces come before the streams are over."""
        for _ in range(8):
            while not pieces.acquire(timeout=0.1):
                if all(r.done() for r in running):
                    return False
        return True

    def disturbed() -> int:
        """How many of two kills fell upon streams that were under way."""
        kills = 0
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(_stream, server, p, pieces.release) for p in PROMPTS]
            while kills < 2 and heard(running):
                before = server.status()["restarts"]
                server.kill_engine()
                server.restarted(before)
                kills += 1
                while pieces.acquire(blocking=False):
                    pass  # what came before the death says nothing of what comes after it
            assert [r.result() for r in running] == undisturbed
        return kills

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        # Streams that a busy machine let come to their end before they were disturbed count for nothing.
        assert any(disturbed() == 2 for _ in range(5))
    finally:
        watching.set()
        watcher.join()
    # An engine on a machine that stalls may not be heard of for a while.
    assert set(answers) <= {"ready", "restarting", "stalled"}


def test_the_engine_ends_when_the_front_is_killed(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    engine = server.status()["engine_pid"]
    server.process.kill()
    server.process.wait()

    def gone() -> bool:
        try:
            os.kill(engine, 0)
        except ProcessLookupError:
            return True
        return False

    assert until(gone), "the engine outlived the front"


def test_sigterm_drains_and_leaves_nothing_behind(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start("--drain-timeout", "120", env={"TMPDIR": str(tmp_path)}).wait_ready()
    engine = server.status()["engine_pid"]
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_stream, server, PROMPTS[0], begun.set)
        assert begun.wait(PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        assert len(answer.result()) > 20
    assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_who_is_connected_when_the_server_ends_is_answered(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    with contextlib.ExitStack() as stack:
        with held(server.process.pid):
            clients = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                for _ in range(300)
            ]
            for client in clients:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            server.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.settimeout(PATIENCE)
            assert client.recv(4096).startswith(b"HTTP/1.1 ")
    assert server.stop() == 0


def test_a_stream_longer_than_the_drain_is_cut_with_an_error(
    start: Callable[..., Server],
) -> None:
    server = start("--drain-timeout", "0.5").wait_ready()
    body = {"prompt": "Once", "max_tokens": 4000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-1]
    assert server.stop() == 0
