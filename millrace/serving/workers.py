"""Where a model's text work runs: small things on the caller's thread, large ones in a process.

Rendering, parsing and handing over tokens hold the interpreter's lock in proportion to a text's
length, and would hold up every stream of the front. Workers start when the first large task comes,
end when they are idle or the server ends, and one that dies costs its own task a second try.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import msgspec

from millrace import errors
from millrace.errors import DeadlineExceeded, EngineUnavailable, MillraceError, Overloaded
from millrace.text.tasks import EncodeTask, TextSide, TextSideConfig
from millrace.text.worker import Broken, Done, Refused, read_frame, reply_decoder, write_frame

log = logging.getLogger("millrace.serving")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LARGE = 64 * 1024
"""Characters from which on a task is a worker's: what is smaller takes less than a hop is worth."""
PROCESSES = 2
MOST_WAITING = 16
PATIENCE = 120.0
"""Seconds that one task may take."""
_TRIES = 2


class TextTask(Protocol[T_co]):
    def run(self, side: TextSide) -> T_co: ...

    def size(self) -> int: ...


class TextDesk:
    """Takes a model's text tasks. Blocks the calling thread, so it is not for the event loop."""

    def __init__(self, side: TextSide) -> None:
        self._side = side
        self._workers = Workers(side.config)

    def run(self, task: TextTask[T]) -> T:
        if task.size() < LARGE:
            return task.run(self._side)
        if isinstance(task, EncodeTask):
            task.refuse(self._side)  # by its length alone, which is no work for a worker
        try:
            data = msgspec.json.encode(task)
        except (TypeError, ValueError):
            return task.run(self._side)  # only Python callers can give what is no JSON
        return cast(T, self._workers.run(data))

    def close(self) -> None:
        self._workers.close()


class Workers:
    """A few processes, each with one task at a time."""

    def __init__(self, config: TextSideConfig, *, most: int = PROCESSES) -> None:
        self._config = config
        self._most = most
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._starting = 0
        self._waiting = 0
        self._closed = False
        self._changed = threading.Condition()

    def run(self, task: bytes) -> Any:
        """What the task brings, or the error that it ends with."""
        for _ in range(_TRIES):
            worker = self._take()
            usable = False
            try:
                reply = worker.ask(task, PATIENCE)
                usable = True
            except _Gone as gone:
                log.warning("a text worker is gone (%s); its task is tried again", gone)
                continue
            except TimeoutError:
                raise DeadlineExceeded(
                    f"The prompt was not read within {PATIENCE:g} seconds."
                ) from None
            finally:
                self._give(worker, usable)
            return _result(reply)
        raise errors.RequestFailed(
            f"The process that reads prompts ended {_TRIES} times over this one."
        )

    def pids(self) -> list[int]:
        with self._changed:
            return [w.pid for w in (*self._idle, *self._busy)]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            idle, busy = list(self._idle), list(self._busy)
            self._idle.clear()
            self._changed.notify_all()
        for worker in idle:
            worker.end()
        for worker in busy:
            worker.kill()  # whoever waits for its reply hears of it, and puts it away

    def _take(self) -> _Worker:
        with self._changed:
            if self._waiting >= MOST_WAITING:
                raise Overloaded(
                    f"{self._waiting} large prompts are waiting to be read. Try again in a moment.",
                    retry_after=5.0,
                )
            self._waiting += 1
            try:
                self._changed.wait_for(self._free)
            finally:
                self._waiting -= 1
            if self._closed:
                raise EngineUnavailable("The server is shutting down.")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    self._busy.add(worker)
                    return worker
                worker.end()
            self._starting += 1
        try:
            worker = _Worker(self._config)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
        with self._changed:
            self._busy.add(worker)
        return worker

    def _free(self) -> bool:
        return self._closed or bool(self._idle) or len(self._busy) + self._starting < self._most

    def _give(self, worker: _Worker, usable: bool) -> None:
        with self._changed:
            self._busy.discard(worker)
            keep = usable and not self._closed
            if keep:
                self._idle.append(worker)
            self._changed.notify()
        if not keep:
            worker.end()


class _Gone(Exception):
    """The process has ended; `str` says how."""


class _Worker:
    def __init__(self, config: TextSideConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "millrace.text.worker", msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: bytes, patience: float) -> Done | Refused | Broken:
        pipes = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        try:
            write_frame(_Unbuffered(pipes[0]), task)
            data = read_frame(_Patient(pipes[1], time.monotonic() + patience))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise _Gone(str(error)) from error
        if data is None:
            raise _Gone(f"status {self._process.wait(5)}")
        reply: Done | Refused | Broken = reply_decoder.decode(data)
        return reply

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


class _Unbuffered:
    """Writes all of it, however small the pipe is."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[self._pipe.write(rest) :]
        return len(data)

    def flush(self) -> None:
        pass


class _Patient:
    """Reads as much as is asked for, until a deadline."""

    def __init__(self, pipe: BinaryIO, deadline: float) -> None:
        self._pipe = pipe
        self._deadline = deadline
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            left = self._deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(left * 1000):
                raise TimeoutError
            part = self._pipe.read(min(count, 1 << 20))
            if not part:
                break
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _result(reply: Done | Refused | Broken) -> Any:
    match reply:
        case Done():
            found = (reply.prompt, reply.count, reply.tokens, reply.text, reply.inputs)
            return next(value for value in found if value is not None)
        case Refused(kind=kind, fields=fields):
            raise _error(kind, fields)
        case Broken(trace=trace):
            log.error("a text worker met an unexpected error\n%s", trace)
            raise errors.RequestFailed("The server met an unexpected error in reading the prompt.")


def _error(kind: str, fields: dict[str, Any]) -> MillraceError:
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, MillraceError)):
        known = MillraceError
    error: MillraceError = known.__new__(known)
    Exception.__init__(error, fields.get("message"))
    vars(error).update(fields)
    return error
