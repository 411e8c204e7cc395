"""Where a model's text work runs: small tasks on the caller's thread, large ones in a process.

Parsing and tokenising hold the interpreter's lock in proportion to a text's length, which delays every
stream of the front. Few small tasks of a model run at a time, since they only take turns. Callers share
the places of each model fairly, and no model's tasks wait for another model's.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Protocol, TypeVar, cast

import msgspec

from millrace import errors
from millrace.errors import MillraceError, TemplateTimeout
from millrace.fair_gate import FairGate
from millrace.text.tasks import ChatTask, EncodeTask, RenderTask, TextSide
from millrace.text.worker import Broken, TaskDone, TaskRefused, reply_decoder
from millrace.worker_pool import TaskSize, WorkerPool

log = logging.getLogger("millrace.serving")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LARGE = 64 * 1024
"""Characters from which on a task is a worker's: what is smaller takes less than a hop is worth."""
AT_ONCE = 2
"""Small tasks of one caller that a model runs at a time; one more place is for other callers."""
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
        self._gate = FairGate(
            AT_ONCE + 1,
            per_caller=AT_ONCE,
            work="to have a prompt read",
            waiting_per_caller=64,
            waiting=256,
        )
        config = msgspec.json.encode(side.config).decode()
        self._workers = WorkerPool(
            ["-m", "millrace.text.worker", config], most=PROCESSES, work="prompt"
        )

    def run(self, task: TextTask[T]) -> T:
        if task.size() < LARGE:
            with self._gate.place() if _is_short(task) else contextlib.nullcontext():
                return task.run(self._side)
        if isinstance(task, EncodeTask):
            task.refuse(self._side)  # by its length alone, which is no work for a worker
        try:
            data = msgspec.json.encode(task)
        except (TypeError, ValueError):
            return task.run(self._side)  # only Python callers can give what is no JSON
        size = TaskSize("text" if _is_short(task) else "grammar", task.size())
        try:
            reply = self._workers.run([data], PATIENCE, size)
            return cast(T, _result(reply_decoder.decode(reply)))
        except TemplateTimeout:
            self._side.dialect.renderer.count_timeout()
            raise

    def close(self) -> None:
        self._gate.close()
        self._workers.close()
        self._side.dialect.renderer.close()


def _is_short(task: TextTask[Any]) -> bool:
    """Whether a small task takes no longer than its text is: a grammar may."""
    if isinstance(task, ChatTask):
        return task.demand is None and not task.chat.tools
    return isinstance(task, EncodeTask | RenderTask)


def _result(reply: TaskDone | TaskRefused | Broken) -> Any:
    match reply:
        case TaskDone():
            found = (reply.prompt, reply.count, reply.tokens, reply.text, reply.inputs)
            return next(value for value in found if value is not None)
        case TaskRefused(kind=kind, fields=fields):
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
