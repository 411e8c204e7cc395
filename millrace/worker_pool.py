"""Worker processes: a few of one program, which take tasks and give replies as frames over pipes.

They start when the first task comes, end when they are idle or the server ends, and one that dies
or is stopped costs its own task a second try. What tasks and replies say is not known here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from millrace.errors import DeadlineExceeded, EngineUnavailable, RequestFailed
from millrace.fair_gate import FairGate
from millrace.frames import read_frame, write_frame

log = logging.getLogger("millrace.serving")

_NICER = 10
"""How much less of a core that they share workers get than an engine: about a tenth."""
_TRIES = 2
_LOOK_SECONDS = 1.0
_STOPPED_LOOKS = 5
"""A process that the system shows as stopped this many looks in a row is replaced. One look is not enough:
a terminal stops and continues all processes of the server together."""
_LEARNT = 0.3
"""The weight of the last task in what a task of its kind is expected to take."""


class WorkerDied(RequestFailed):
    """A task that ended every process it was given to."""


@dataclass(frozen=True)
class TaskSize:
    """What is known of a task before it runs: tasks of one kind take time in proportion to size."""

    kind: str = ""
    amount: float = 0.0


class WorkerPool:
    """A few processes of one program, each with one task at a time, shared fairly between callers.

    One caller's tasks run in at most `most` processes; one more serves the others.
    """

    def __init__(
        self,
        program: Sequence[str],
        *,
        most: int,
        work: str,
        nicer: int = _NICER,
        waiting_per_caller: int = 16,
        waiting: int = 128,
    ) -> None:
        """`program` is what Python is given; `work` names a task in errors, like `large prompt`.
        `nicer` is how much the processes' niceness is above that of this one."""
        self._program = program
        self._most = most
        self._work = work
        self._nicer = nicer
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._gate = FairGate(
            most + 1,
            per_caller=most,
            work=f"to have a {work} read",
            waiting_per_caller=waiting_per_caller,
            waiting=waiting,
        )
        self._rates: dict[str, float] = {}
        """Seconds that tasks of each kind take for one unit of their size, lately."""
        self._closed = False
        self._lock = threading.Lock()

    def run(
        self,
        task: Sequence[bytes],
        patience: float,
        size: TaskSize = TaskSize(),  # noqa: B008
    ) -> bytes | memoryview:
        """The reply to a task, which may come in parts and take `patience` seconds."""
        for _ in range(_TRIES):
            with self._gate.place(self._rates.get(size.kind, 0.0) * size.amount):
                begun = time.monotonic()
                try:
                    return self._asked(task, patience)
                except _Gone as gone:
                    log.warning("a worker for a %s is gone (%s)", self._work, gone)
                finally:
                    self._learn(size, time.monotonic() - begun)
        raise WorkerDied(f"The process that read the {self._work} ended {_TRIES} times over it.")

    def _asked(self, task: Sequence[bytes], patience: float) -> bytes | memoryview:
        worker = self._take()
        usable = False
        try:
            reply = worker.ask(task, patience)
            usable = True
            return reply
        except TimeoutError:
            raise DeadlineExceeded(
                f"The {self._work} was not read within {patience:g} seconds."
            ) from None
        finally:
            self._give(worker, usable)

    def open(self) -> None:
        """Start one process, so that the first task need not wait for it."""
        worker = self._take()
        self._give(worker, True)

    def pids(self) -> list[int]:
        with self._lock:
            return [w.pid for w in (*self._idle, *self._busy)]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, busy = list(self._idle), list(self._busy)
            self._idle.clear()
        self._gate.close()
        for worker in idle:
            worker.end()
        for worker in busy:
            worker.kill()  # the thread that waits for its reply puts it away

    def _learn(self, size: TaskSize, seconds: float) -> None:
        if size.amount:
            rate = seconds / size.amount
            known = self._rates.get(size.kind, rate)
            self._rates[size.kind] = known + _LEARNT * (rate - known)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise EngineUnavailable("The server is shutting down.")
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    self._busy.add(worker)
                    return worker
                worker.end()
        try:
            worker = _Worker(self._program, self._nicer)
        except (OSError, RuntimeError) as error:  # no memory, no descriptors, no threads
            raise EngineUnavailable(
                f"The process for a {self._work} cannot be started: {error}. The limits of the server's "
                "process (ulimit) may be too low."
            ) from error
        with self._lock:
            if not self._closed:
                self._busy.add(worker)
                return worker
        worker.end()
        raise EngineUnavailable("The server is shutting down.")

    def _give(self, worker: _Worker, usable: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            keep = usable and not self._closed
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.end()


class _Gone(Exception):
    """The process has ended; `str` says how."""


class _Worker:
    def __init__(self, program: Sequence[str], nicer: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        # A process that ends while it is idle does not stay behind as a zombie.
        threading.Thread(target=self._process.wait, name="worker-end", daemon=True).start()
        # New requests wait a little longer, so that running streams have fewer gaps.
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0) + nicer
            os.setpriority(os.PRIO_PROCESS, self.pid, nice)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: Sequence[bytes], patience: float) -> bytes | memoryview:
        pipes = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        deadline = time.monotonic() + patience
        try:
            write_frame(_Persistent(pipes[0], _Wait(self._process, pipes[0], deadline)), *task)
            data = read_frame(_Patient(pipes[1], _Wait(self._process, pipes[1], deadline)))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise _Gone(str(error)) from error
        if data is None:
            raise _Gone(f"status {self._process.wait(5)}")
        return data

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


class _Wait:
    """Waits for one end of a pipe, until a deadline, and while the process at the other end can run."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: BinaryIO, deadline: float) -> None:
        self._pid = process.pid
        self._deadline = deadline
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLOUT if pipe is process.stdin else select.POLLIN)

    def until_ready(self) -> None:
        looks = 0
        while (left := self._deadline - time.monotonic()) > 0:
            if self._poll.poll(min(left, _LOOK_SECONDS) * 1000):
                return
            looks = looks + 1 if _is_stopped(self._pid) else 0
            if looks >= _STOPPED_LOOKS:
                raise _Gone("it was stopped")
        raise TimeoutError


def _is_stopped(pid: int) -> bool:
    """Whether a child was stopped by a signal. False where the system does not tell it without the
    child's end being taken from whoever waits for it."""
    if not hasattr(os, "waitid"):
        return False
    try:
        state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return state is not None


class _Persistent:
    """Writes all of it, however small the pipe is: a process that has been stopped reads nothing."""

    def __init__(self, pipe: BinaryIO, wait: _Wait) -> None:
        self._pipe = pipe
        self._wait = wait
        os.set_blocking(pipe.fileno(), False)

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            self._wait.until_ready()
            rest = rest[self._pipe.write(rest) or 0 :]
        return len(data)

    def flush(self) -> None:
        pass


class _Patient:
    """Reads as much as is asked for."""

    def __init__(self, pipe: BinaryIO, wait: _Wait) -> None:
        self._pipe = pipe
        self._wait = wait

    def read(self, count: int) -> memoryview:
        # Into one place: to put parts together would hold the interpreter's lock for as long.
        found = memoryview(bytearray(count))
        done = 0
        while done < count:
            self._wait.until_ready()
            read: int = self._pipe.readinto(found[done:])  # type: ignore[attr-defined]
            if not read:
                break
            done += read
        return found[:done]
