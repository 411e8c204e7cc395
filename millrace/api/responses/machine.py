"""One machine turns an answer's events into output items and wire events.

A streamed answer is its events, a whole one is its last state: they cannot differ. It knows nothing
of HTTP, of the store, or of how the events come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from millrace.api.responses.items import Item
from millrace.api.responses.parts import (
    Open,
    OpenCall,
    OpenFreeform,
    OpenMessage,
    OpenThought,
    Status,
    Wire,
)
from millrace.errors import BadRequest, Cancelled, MillraceError, Overloaded
from millrace.protocol import TokenLogprob
from millrace.serving.toolbox import Offered
from millrace.text.deltas import (
    Content,
    Delta,
    Event,
    Piece,
    Reasoning,
    TextFinish,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)

Scorer = Callable[[list[TokenLogprob]], list[Any]]


class Machine:
    def __init__(
        self,
        echo: Mapping[str, Any],
        offered: Mapping[str, Offered],
        *,
        queued: bool = False,
        summary: bool = False,
        sealed: bool = False,
        scorer: Scorer | None = None,
    ) -> None:
        """`echo` is all of the response object that does not depend on the answer."""
        self._echo = echo
        self._offered = offered
        self._summary = summary
        self._sealed = sealed
        self._scorer = scorer
        self._done: list[Item] = []
        self._open: Open | None = None
        self._number = 0
        self._finish: TextFinish | None = None
        self._usage: Usage | None = None
        self._ended: float | None = None
        self.status = "queued" if queued else "in_progress"
        self.error: MillraceError | None = None
        self.store_error: MillraceError | None = None

    def begin(self) -> list[Wire]:
        created = self._state("response.created")
        return [created, self._state(f"response.{self.status}")]

    def start(self) -> list[Wire]:
        """A queued response has come to its turn."""
        if self.status != "queued":
            return []
        self.status = "in_progress"
        return [self._state("response.in_progress")]

    def feed(self, event: Event) -> list[Wire]:
        match event:
            case Delta(piece=piece, logprobs=scores):
                return self.start() + self._stamp(self._take(piece, scores))
            case Usage():
                self._usage = event
        return []

    def end(self) -> Wire:
        """The last event; from now on the response is what it is."""
        assert self._finish is not None
        self.status = _cut(self._finish)
        self._ended = time.time()
        return self._state(f"response.{self.status}")

    def fail(self, error: MillraceError) -> list[Wire]:
        """The last events of an answer that broke off."""
        self.error = error
        self.status = "cancelled" if isinstance(error, Cancelled) else "failed"
        ended = self._stamp(self._close("incomplete"))
        return [*ended, self._state("response.failed")]

    def not_stored(self, error: MillraceError) -> None:
        """The answer is whole, and the store did not take it."""
        self.store_error = error
        self._echo = {
            **self._echo,
            "store": False,
            "store_error": {"code": error.code, "message": error.message},
        }

    def response(self) -> dict[str, Any]:
        """The response object as it stands."""
        output = self._done + ([self._open.item] if self._open else [])
        state: dict[str, Any] = {
            "status": self.status,
            "completed_at": int(self._ended) if self._ended and self._completed else None,
            "error": _error(self.error),
            "incomplete_details": None,
            "output": output,
            "usage": usage_of(self._usage) if self._usage else None,
        }
        if self.status == "incomplete":
            state["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._finish is not None and self._finish.matched is not None:
            state["matched_stop"] = self._finish.matched
        if self._finish is not None:
            state |= self._finish.details
        return {**self._echo, **state}

    @property
    def _completed(self) -> bool:
        return self.status == "completed"

    def _take(self, piece: Piece | TextFinish, scores: list[TokenLogprob]) -> list[Wire]:
        match piece:
            case Content(text=text):
                wanted = self._scorer(scores) if self._scorer else []
                return self._in(OpenMessage) + self._add(text, wanted)
            case Reasoning(text=text):
                return self._in(OpenThought) + self._add(text, [])
            case ToolCallStart():
                return self._close("completed") + self._call(piece)
            case ToolCallArguments(text=text):
                return self._add(text, [])
            case TextFinish():
                self._finish = piece
                return self._close(_cut(piece)) or self._nothing()

    def _add(self, text: str, scores: list[Any]) -> list[Wire]:
        assert self._open is not None
        return self._open.add(text, scores)

    def _in(self, kind: type[Open]) -> list[Wire]:
        """Be in an item of this kind."""
        if isinstance(self._open, kind):
            return []
        closed = self._close("completed")
        index = len(self._done)
        if kind is OpenThought:
            self._open = OpenThought(index, self._summary, self._sealed)
        else:
            self._open = OpenMessage(index)
        return closed + self._open.begin()

    def _call(self, call: ToolCallStart) -> list[Wire]:
        offered = self._offered.get(call.name, Offered("function", call.name))
        kind = OpenFreeform if offered.kind == "custom" else OpenCall
        self._open = kind(len(self._done), call, offered)
        return self._open.begin()

    def _close(self, status: Status) -> list[Wire]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self._done.append(item)
        self._open = None
        return events

    def _nothing(self) -> list[Wire]:
        """An answer without a word is an empty message."""
        if self._done:
            return []
        return self._in(OpenMessage) + self._close("completed")

    def _state(self, type: str) -> Wire:
        (event,) = self._stamp([{"type": type, "response": self.response()}])
        return event

    def _stamp(self, events: list[Wire]) -> list[Wire]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events


def _cut(finish: TextFinish) -> Status:
    return "incomplete" if finish.reason == "length" else "completed"


def _error(error: MillraceError | None) -> dict[str, Any] | None:
    """In the words that this protocol has for what goes wrong with an accepted request."""
    match error:
        case None | Cancelled():
            return None
        case Overloaded():
            code = "rate_limit_exceeded"
        case BadRequest():
            code = "invalid_prompt"
        case _:
            code = "server_error"
    return {"code": code, "message": error.message}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
