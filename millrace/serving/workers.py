"""Where a model's text work runs: small things on the caller's thread, large ones in a process.

Rendering, parsing and handing over tokens hold the interpreter's lock in proportion to a text's
length, and would hold up every stream of the front.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, TypeVar, cast

import msgspec

from millrace import errors
from millrace.errors import MillraceError
from millrace.serving.pool import WorkerPool
from millrace.text.tasks import EncodeTask, TextSide
from millrace.text.worker import Broken, Done, Refused, reply_decoder

log = logging.getLogger("millrace.serving")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LARGE = 64 * 1024
"""Characters from which on a task is a worker's: what is smaller takes less than a hop is worth."""
PROCESSES = 2
PATIENCE = 120.0
"""Seconds that one task may take."""


class TextTask(Protocol[T_co]):
    def run(self, side: TextSide) -> T_co: ...

    def size(self) -> int: ...


class TextDesk:
    """Takes a model's text tasks. Blocks the calling thread, so it is not for the event loop."""

    def __init__(self, side: TextSide) -> None:
        self._side = side
        config = msgspec.json.encode(side.config).decode()
        self._workers = WorkerPool(
            ["-m", "millrace.text.worker", config], most=PROCESSES, work="prompt"
        )

    def run(self, task: TextTask[T]) -> T:
        if task.size() < LARGE:
            return task.run(self._side)
        if isinstance(task, EncodeTask):
            task.refuse(self._side)  # by its length alone, which is no work for a worker
        try:
            data = msgspec.json.encode(task)
        except (TypeError, ValueError):
            return task.run(self._side)  # only Python callers can give what is no JSON
        return cast(T, _result(reply_decoder.decode(self._workers.run([data], PATIENCE))))

    def close(self) -> None:
        self._workers.close()


def _result(reply: Done | Refused | Broken) -> Any:
    match reply:
        case Done():
            found = (reply.prompt, reply.count, reply.tokens, reply.text, reply.inputs)
            return next(value for value in found if value is not None)
        case Refused(kind=kind, fields=fields):
            raise error_of(kind, fields)
        case Broken(trace=trace):
            log.error("a text worker met an unexpected error\n%s", trace)
            raise errors.RequestFailed("The server met an unexpected error in reading the prompt.")


def error_of(kind: str, fields: dict[str, Any]) -> MillraceError:
    """An error that a worker ended a task with."""
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, MillraceError)):
        known = MillraceError
    error: MillraceError = known.__new__(known)
    Exception.__init__(error, fields.get("message"))
    vars(error).update(fields)
    return error
