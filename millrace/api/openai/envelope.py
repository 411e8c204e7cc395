"""What chat and completions say alike around an answer: the head, the cost, and the stream."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from millrace.api.answer import DONE, KEEP_ALIVE, data
from millrace.api.openai.schema import OpenAICommon, StreamOptions
from millrace.errors import BadRequest
from millrace.serving.model import ServedModel
from millrace.text.deltas import Event, Idle, Usage
from millrace.version import __version__


def head_of(id: str, kind: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": fingerprint(model),
    }


def fingerprint(model: ServedModel) -> str:
    """Changes with whatever a seed's meaning may change with: program, model and device."""
    ready = model.client.ready
    device = (ready.device, ready.dtype) if ready else ()
    text = f"{__version__}\0{model.tokenizer.folder}\0{device}"
    return "fp_" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def ending_in(choice: dict[str, Any]) -> dict[str, Any]:
    """The fields of a choice's last chunk that say how it ended."""
    names = ("finish_reason", "matched_stop", "finish_details")
    return {name: choice[name] for name in names if name in choice}


def stream_options_of(wire: OpenAICommon) -> StreamOptions:
    options = wire.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise BadRequest(
            "continuous_usage_stats needs include_usage: true.",
            param="stream_options.continuous_usage_stats",
        )
    return options


class RunningAnswers(Protocol):
    """A running request, or several that are answered as one."""

    @property
    def n(self) -> int: ...

    def events(self) -> AsyncIterator[Event]: ...

    def usage_of(self, choice: int) -> Usage:
        """The usage so far of the prompt that this choice answers."""


class Chunks(Protocol):
    """Events of an answer in, its chunks out."""

    def begin(self, n: int) -> Iterable[dict[str, Any]]: ...

    def feed(self, event: Event) -> Iterable[dict[str, Any]]: ...


class ChunkFolding(ABC):
    """Chunks in, the whole answer out."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        self._head = self._head or {k: v for k, v in chunk.items() if k != "choices"}
        self._usage = chunk.get("usage") or self._usage
        for told in chunk["choices"]:
            self._add(told)

    def whole(self) -> dict[str, Any]:
        return self._head | {"choices": self._choices(), "usage": self._usage}

    @abstractmethod
    def _add(self, told: dict[str, Any]) -> None:
        """A piece of one choice."""

    @abstractmethod
    def _choices(self) -> list[dict[str, Any]]: ...


async def streamed(
    answering: RunningAnswers, chunks: Chunks, options: StreamOptions
) -> AsyncIterator[bytes]:
    def written(chunk: dict[str, Any]) -> bytes:
        if options.continuous_usage_stats and chunk["choices"]:
            so_far = answering.usage_of(chunk["choices"][0]["index"])
            chunk = chunk | {"usage": usage_of(so_far)}
        return data(chunk)

    for chunk in chunks.begin(answering.n):
        yield written(chunk)
    async for event in answering.events():
        if isinstance(event, Idle):
            yield KEEP_ALIVE
        elif options.include_usage or not isinstance(event, Usage):
            for chunk in chunks.feed(event):
                yield written(chunk)
    yield DONE


async def folded(
    events: AsyncIterator[Event], n: int, chunks: Chunks, folding: ChunkFolding
) -> dict[str, Any]:
    """The same chunks, put together: what is whole cannot differ from what is streamed."""
    for chunk in chunks.begin(n):
        folding.add(chunk)
    async for event in events:
        for chunk in chunks.feed(event):
            folding.add(chunk)
    return folding.whole()
