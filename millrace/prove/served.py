"""A `millrace serve` of our own, and asking it over HTTP as any client would.

It knows the server's wire and nothing of its inside. Answers come whole or as they are made; what is
wrong with one is a sentence.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from millrace.bench.sse import DONE, Events, error_text
from millrace.errors import SetupError
from millrace.ports import free_port
from millrace.prove.processes import ChildProcess, child
from millrace.prove.questions import REPORTED, ProvedAnswer, Question

PATIENCE = 600.0
"""Seconds for a start and for an answer."""
_GREETING = "Once upon a time"

Seen = Callable[[int, float], None]
"""Hears how many tokens an answer has, and when."""


class _Meta(msgspec.Struct):
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int] = []
    text: str = ""
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class _Count(msgspec.Struct):
    """Of an event only what is timed."""

    output_ids: list[int] = []
    error: Any = None


class Memory(msgspec.Struct):
    active: int = 0
    peak: int = 0
    cached: int = 0
    total: int = 0


class ServedState(msgspec.Struct, kw_only=True):
    """What `/v1/status` tells of the model."""

    name: str
    state: str
    engine_pid: int | None = None
    restarts: int = 0
    context_window: int | None = None
    device: str | None = None
    dtype: str | None = None
    weight_bytes: int | None = None
    load_seconds: float | None = None
    kv_budget: int | None = None
    kv_bytes_per_token: float | None = None
    device_memory: Memory | None = None
    kv_bytes: int = 0
    cache_bytes: int = 0


class _Status(msgspec.Struct):
    models: list[ServedState]


class Served:
    """A running server."""

    def __init__(self, process: ChildProcess, url: str) -> None:
        self._child = process
        self.http = httpx.Client(
            base_url=url,
            timeout=PATIENCE,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self.started_in = 0.0
        """Seconds from the start of its process to the first answer."""

    def wait(self, since: float) -> None:
        """Until it has answered; before that the port is closed, or says 503."""
        body = {"text": _GREETING, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        while time.perf_counter() < since + PATIENCE:
            if (status := self._child.process.poll()) is not None:
                raise self._child.failed(f"ended with status {status}.")
            try:
                answer = self.http.post("/generate", json=body)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            if answer.status_code == 200:
                self.started_in = time.perf_counter() - since
                return
            if answer.status_code != 503:
                raise SetupError(f"The first answer: {error_text(answer.content)}")
            time.sleep(0.02)
        raise self._child.failed(f"did not answer within {PATIENCE:.0f} s.")

    def get(self, path: str) -> bytes:
        answer = self.http.get(path)
        if answer.status_code != 200:
            raise SetupError(f"{path}: HTTP {answer.status_code}: {error_text(answer.content)}")
        return answer.content

    def state(self) -> ServedState:
        return msgspec.json.decode(self.get("/v1/status"), type=_Status).models[0]

    def width(self) -> int:
        """Tokens of the vocabulary."""
        return int(msgspec.json.decode(self.get("/get_model_info"))["vocab_size"])

    def steps(self) -> int:
        """Decode steps so far."""
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith("millrace_step_seconds_count"):
                return int(float(line.split()[-1]))
        return 0

    def tokenize(self, text: str) -> list[int]:
        answer = self.http.post("/tokenize", json={"prompt": text})
        if answer.status_code != 200:
            raise SetupError(f"/tokenize: {error_text(answer.content)}")
        return list(answer.json()["tokens"])

    def ask(self, question: Question, *, salt: str, scored: bool = False) -> ProvedAnswer:
        """One answer, whole. Only questions of the same salt share state; `scored` tells logprobs."""
        answer = self.http.post("/generate", json=_body(question, salt, scored))
        if answer.status_code != 200:
            raise SetupError(f"HTTP {answer.status_code}: {error_text(answer.content)}")
        return _read(msgspec.json.decode(answer.content, type=_Generated))

    def stream(self, question: Question, *, salt: str, seen: Seen) -> ProvedAnswer:
        """The same as it is made. What comes later may only add to what came before."""
        before: list[int] = []
        last = b""
        for now, data in self._events("/generate", _body(question, salt, False)):
            tokens = msgspec.json.decode(data, type=_Count)
            if tokens.error is not None:
                raise SetupError(f"The stream failed: {error_text(data)}")
            if tokens.output_ids[: len(before)] != before:
                raise SetupError("A stream took back tokens that it had sent.")
            if len(tokens.output_ids) > len(before):
                seen(len(tokens.output_ids), now)
            before, last = tokens.output_ids, data
        if not last:
            raise SetupError("A stream ended without an answer.")
        return _read(msgspec.json.decode(last, type=_Generated))

    def stream_text(self, question: Question, *, salt: str) -> str:
        """The text of OpenAI's stream, put together."""
        sampling = question.sampling()
        body: dict[str, Any] = {
            "prompt": question.ids,
            "max_tokens": sampling.pop("max_new_tokens"),
            "stream": True,
            "cache_salt": salt,
            **sampling,
        }
        if "sampling_seed" in body:
            body["seed"] = body.pop("sampling_seed")
        text = ""
        for _, data in self._events("/v1/completions", body):
            event = msgspec.json.decode(data)
            if "error" in event:
                raise SetupError(f"The stream failed: {error_text(data)}")
            text += "".join(choice["text"] for choice in event["choices"])
        return text

    def together(
        self, work: Sequence[Callable[[threading.Barrier], ProvedAnswer]]
    ) -> list[ProvedAnswer]:
        """All at once: each waits at the barrier until all are there."""
        barrier = threading.Barrier(len(work))
        with ThreadPoolExecutor(len(work)) as pool:
            return [future.result() for future in [pool.submit(one, barrier) for one in work]]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, bytes]]:
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                raise SetupError(f"HTTP {response.status_code}: {error_text(response.read())}")
            events = Events()
            ended = False
            for received in response.iter_bytes():
                now = time.perf_counter()
                for data in events.feed(received):
                    ended = ended or data == DONE
                    if not ended:
                        yield now, data
            if not ended:
                raise SetupError("A stream was cut.")


@contextlib.contextmanager
def serve(folder: Path, *options: str, room: Path) -> Iterator[Served]:
    """A server of that model, which has answered once."""
    port = free_port()
    words = ["serve", str(folder), "--name", "proven", "--only", "--port", str(port), *options]
    since = time.perf_counter()
    with child("The server", "millrace", *words, room=room) as process:
        server = Served(process, f"http://127.0.0.1:{port}")
        try:
            server.wait(since)
            yield server
        finally:
            server.http.close()


def _body(question: Question, salt: str, scored: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": question.ids,
        "sampling_params": question.sampling(),
        "cache_salt": salt,
    }
    if scored:
        body |= {"return_logprob": True, "top_logprobs_num": REPORTED}
    return body


def _read(answer: _Generated) -> ProvedAnswer:
    if answer.error is not None:
        raise SetupError(f"The answer failed: {answer.error}")
    meta = answer.meta_info
    tops = None
    if meta.output_token_logprobs is not None and meta.output_top_logprobs is not None:
        tops = [
            {token: p for p, token, _ in top or ()} | {own[1]: own[0]}
            for own, top in zip(meta.output_token_logprobs, meta.output_top_logprobs, strict=True)
        ]
    return ProvedAnswer(answer.output_ids, answer.text, meta.cached_tokens, tops)
