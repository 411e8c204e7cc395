"""An answer as lines while it is made, or as one object, with what it took reported at its end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from millrace.api.ollama.lines import BLANK, line, now
from millrace.api.ollama.parts import OllamaPart, OllamaReader, Shape
from millrace.serving.model import ServedModel
from millrace.serving.running import Running
from millrace.text.deltas import Delta, Idle, Usage


class Clock:
    """What an answer took, from the request's arrival on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._prepared = self._began

    def prepared(self) -> None:
        """The prompt is ready for the model."""
        self._prepared = time.monotonic()

    def durations(self, running: Running, up_since: float | None) -> dict[str, int]:
        """`up_since` is when the model came up."""
        loaded = max(self._prepared, up_since or 0.0)
        first = running.first_token or loaded
        return {
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": _nanoseconds(loaded - self._began),
            "prompt_eval_duration": _nanoseconds(first - loaded),
            "eval_duration": _nanoseconds(running.last_token - first),
        }


def _nanoseconds(seconds: float) -> int:
    # Clients divide by these.
    return max(1, round(seconds * 1e9))


class OllamaResponse:
    """The lines of one answer."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        running: Running,
        clock: Clock,
        model: ServedModel,
        context: Callable[[OllamaReader], list[int] | None] = lambda _: None,
    ) -> None:
        self._name = name
        self._shape = shape
        self._running = running
        self._clock = clock
        self._model = model
        self._context = context
        self._reader = OllamaReader()
        self._usage = Usage(0, 0)

    async def stream(self) -> AsyncIterator[bytes]:
        async for part in self._parts():
            yield line(self._line(part)) if part is not None else BLANK
        yield line(self._line(OllamaPart()) | self._end())

    async def whole(self) -> dict[str, Any]:
        message = OllamaPart()
        async for part in self._parts():
            if part is not None:
                message += part
        return self._line(message) | self._end()

    async def _parts(self) -> AsyncIterator[OllamaPart | None]:
        """None where nothing came for a while."""
        async for event in self._running.events():
            match event:
                case Delta():
                    if part := self._reader.read(event):
                        yield part
                case Usage():
                    self._usage = event
                case Idle():
                    yield None

    def _line(self, part: OllamaPart) -> dict[str, Any]:
        found = {"model": self._name, "created_at": now(), **self._shape(part), "done": False}
        if part.scores:
            found["logprobs"] = [
                self._token(s.token, s.logprob)
                | {"top_logprobs": [self._token(t, v) for t, v in s.top]}
                for s in part.scores
            ]
        return found

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._model.tokenizer.vocabulary.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    def _end(self) -> dict[str, Any]:
        finish = self._reader.finish
        found: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if finish and finish.reason == "length" else "stop",
            **self._clock.durations(self._running, self._model.client.ready_since),
            "prompt_eval_count": self._usage.prompt,
            "eval_count": self._usage.completion,
            **(finish.details if finish else {}),
        }
        if (context := self._context(self._reader)) is not None:
            found["context"] = context
        return found
