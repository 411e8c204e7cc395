"""Sends requests and times their streams: a closed loop of clients, or an open loop of arrivals.

Every failure becomes a sample, so that a run never dies of a server's fault. Nothing here decides
what is sent or what the times mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Literal

import httpx
import msgspec

from millrace.bench.samples import BenchTarget, Failure, RequestSample
from millrace.bench.sse import DONE, Events, ReportedUsage, StreamChunk, error_text, read_chunk
from millrace.bench.workload import Item

Endpoint = Literal["chat", "completions"]
_PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}

_DRAIN = 1.0

Record = Callable[[RequestSample], None]


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are put to a server."""

    endpoint: Endpoint = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 600.0
    specprefill: bool | None = None
    """Sent where somebody chose; so is the share that stays."""
    specprefill_keep_pct: float | None = None


def make_client() -> httpx.AsyncClient:
    """A client without limits of its own: waiting in its pool would count as the server's time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)


def headers(target: BenchTarget) -> dict[str, str]:
    plain = {"content-type": "application/json", "accept-encoding": "identity"}
    if target.api_key is not None:
        plain["authorization"] = f"Bearer {target.api_key}"
    return plain


def body(item: Item, model: str, wire: Wire) -> bytes:
    """The request as JSON. No seed: some servers stop batching when they see one."""
    fields: dict[str, object] = {
        "model": model,
        "max_tokens": item.max_tokens,
        "temperature": wire.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if wire.endpoint == "chat":
        fields["messages"] = item.messages
    else:
        fields["prompt"] = item.prompt
    if wire.ignore_eos:
        fields["ignore_eos"] = True
    if wire.specprefill is not None:
        fields["specprefill"] = wire.specprefill
    if wire.specprefill_keep_pct is not None:
        fields["specprefill_keep_pct"] = wire.specprefill_keep_pct
    return msgspec.json.encode(fields)


async def closed_loop(
    http: httpx.AsyncClient,
    target: BenchTarget,
    wire: Wire,
    items: list[Item],
    *,
    clients: int,
    number: int,
    record: Record,
) -> None:
    """`clients` clients take the items in turn, each sending its next when its last has ended."""
    queue = iter(items)

    async def client(queue: Iterator[Item]) -> None:
        for item in queue:
            record(await send(http, target, wire, item, number=number))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(items))):
            group.create_task(client(queue))


async def open_loop(
    http: httpx.AsyncClient,
    target: BenchTarget,
    wire: Wire,
    items: list[Item],
    *,
    number: int,
    record: Record,
) -> None:
    """Every item is sent at its arrival time, however many are still running."""
    start = time.perf_counter()

    async def one(item: Item) -> None:
        record(await send(http, target, wire, item, number=number))

    async with asyncio.TaskGroup() as group:
        for item in items:
            await asyncio.sleep(start + (item.arrival or 0.0) - time.perf_counter())
            group.create_task(one(item))


async def send(
    http: httpx.AsyncClient, target: BenchTarget, wire: Wire, item: Item, *, number: int = 0
) -> RequestSample:
    """One request, from its first byte out to its last byte in."""
    payload = body(item, target.model, wire)
    watch = _Stopwatch()
    failure: Failure | None
    try:
        async with asyncio.timeout(wire.timeout):
            failure = await _stream(http, target, wire, payload, watch)
    except TimeoutError:
        failure = Failure(kind="timeout", message=f"No end within {wire.timeout:g} s.")
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        failure = Failure(kind="connect", message=str(error))
    except httpx.HTTPError as error:
        failure = Failure(kind="cut", message=str(error) or type(error).__name__)
    except msgspec.MsgspecError as error:
        failure = Failure(kind="bad_stream", message=str(error))
    return watch.sample(item, number, failure)


async def _stream(
    http: httpx.AsyncClient, target: BenchTarget, wire: Wire, payload: bytes, watch: _Stopwatch
) -> Failure | None:
    url = target.url + _PATHS[wire.endpoint]
    async with http.stream("POST", url, content=payload, headers=headers(target)) as response:
        if response.status_code != 200:
            message = error_text(await response.aread())
            kind: Literal["rejected", "http"] = (
                "rejected" if response.status_code == 429 else "http"
            )
            return Failure(kind=kind, status=response.status_code, message=message)
        events = Events()
        rest = response.aiter_bytes()
        async for received in rest:
            now = time.perf_counter()
            for data in events.feed(received):
                if data == DONE:
                    watch.ended = now
                    await _drain(rest)
                    return None
                chunk = read_chunk(data)
                if chunk.error is not None:
                    return Failure(kind="stream_error", message=chunk.error)
                watch.take(chunk, now)
    if watch.finish_reason is None:
        return Failure(kind="cut", message="The stream ended without a finish_reason or [DONE].")
    return None


async def _drain(rest: AsyncIterator[bytes]) -> None:
    """Reads to the end of the body, since a connection is only kept when nothing is left on it."""
    try:
        async with asyncio.timeout(_DRAIN):
            async for _ in rest:
                pass
    except (TimeoutError, httpx.HTTPError):
        pass


class _Stopwatch:
    """What one stream has shown so far."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self._usage = ReportedUsage()
        self.ended: float | None = None
        self._texts: list[float] = []
        self._started = time.perf_counter()

    def take(self, chunk: StreamChunk, now: float) -> None:
        if chunk.text:
            self._texts.append(now)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self._usage = chunk.usage or self._usage

    def sample(self, item: Item, number: int, failure: Failure | None) -> RequestSample:
        texts = self._texts
        return RequestSample(
            round=number,
            started=self._started,
            e2e=(self.ended or time.perf_counter()) - self._started,
            max_tokens=item.max_tokens,
            ttft=texts[0] - self._started if texts else None,
            gaps=tuple(b - a for a, b in pairwise(texts)),
            events=len(texts),
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=self._usage.cached_tokens,
            completion_tokens=self._usage.completion_tokens,
            finish_reason=self.finish_reason,
            failure=failure,
        )
