"""A scripted OpenAI-compatible server for the load generator's tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

Step = tuple[str, Any]
Script = Callable[[int, dict[str, Any]], list[Step]]


def delta(**fields: Any) -> Step:
    return "event", {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def finish(reason: str = "length") -> Step:
    return "event", {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, completion: int) -> Step:
    return "event", {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def answer(tokens: int, *, first: float = 0.0, gap: float = 0.0, prompt: int = 100) -> list[Step]:
    """A role at once, the first text after `first` seconds, then one every `gap`."""
    steps: list[Step] = [delta(role="assistant", content=""), ("sleep", first)]
    for i in range(tokens):
        steps += [("sleep", gap if i else 0.0), delta(content=f" w{i}")]
    return [*steps, finish(), usage(prompt, tokens), ("done", None)]


@dataclass
class Fake:
    script: Script
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                await self._request(request.decode(), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(
        self, line: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = {}
        while (raw := (await reader.readline()).decode().strip()) != "":
            name, _, value = raw.partition(":")
            head[name.lower()] = value.strip()
        body = await reader.readexactly(int(head.get("content-length", 0)))
        if line.startswith("GET /v1/models"):
            await _whole(writer, 200, {"data": [{"id": "fake"}]})
            return
        self.bodies.append(json.loads(body))
        self.headers.append(head)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._play(self.script(len(self.bodies) - 1, self.bodies[-1]), writer)
        finally:
            self.running -= 1

    async def _play(self, steps: list[Step], writer: asyncio.StreamWriter) -> None:
        if steps and steps[0][0] == "status":
            await _whole(writer, steps[0][1], {"error": {"message": "as scripted"}})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for kind, value in steps:
            if kind == "sleep":
                await asyncio.sleep(value)
            elif kind == "cut":
                writer.transport.abort()
                raise ConnectionError
            elif kind == "end":
                break
            else:
                data = _event(kind, value)
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _event(kind: str, value: Any) -> bytes:
    if kind == "raw":
        return bytes(value)
    text = "[DONE]" if kind == "done" else json.dumps(value)
    return f"data: {text}\n\n".encode()


async def _whole(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


@asynccontextmanager
async def serve(script: Script) -> AsyncIterator[Fake]:
    fake = Fake(script)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()


@contextmanager
def serve_in_thread(script: Script) -> Iterator[Fake]:
    """For tests whose own thread runs the command line."""
    started, fakes = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serve(script) as fake:
            fakes.append(fake)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    started.wait()
    try:
        yield fakes[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
