"""Threads that are shared fairly between callers (millrace.caller, millrace.fair_queue).

A caller uses at most its own number of threads, so what one caller sends, however slow, leaves
threads for the others.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from millrace.caller import current_caller
from millrace.fair_queue import FairQueue, QueueEntry, QueueFull

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple[Future[Any], Callable[[], Any]]
_Entry = QueueEntry[_Work]


class FairExecutor(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose queue is fair by caller; may be an event loop's default one."""

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        per_caller: int | None = None,
        waiting_per_caller: int = 256,
        waiting: int = 4096,
    ) -> None:
        """`per_caller` of the threads are one caller's at most; `waiting` bounds the queue."""
        super().__init__(threads, thread_name_prefix=name)
        self._threads_free = threads
        self._per_caller = per_caller or threads
        self._fair: FairQueue[_Work] = FairQueue(per_caller=waiting_per_caller, total=waiting)
        self._lock = threading.RLock()  # a cancelled future calls back where it was cancelled

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_expected(0.0, functools.partial(fn, *args, **kwargs))

    def submit_expected(self, seconds: float, work: Callable[[], T]) -> Future[T]:
        """Work with the number of seconds that it is expected to take; raises Overloaded."""
        future: Future[T] = Future()
        caller = current_caller.get()
        own = functools.partial(contextvars.copy_context().run, work)
        with self._lock:
            try:
                entry, displaced = self._fair.push(
                    caller,
                    (future, own),
                    now=time.monotonic(),
                    expected=seconds,
                )
            except QueueFull as full:
                raise full.overloaded("to be prepared") from None
        if displaced is not None:
            lost = displaced.item[0]
            if lost.set_running_or_notify_cancel():
                lost.set_exception(QueueFull(len(self._fair)).overloaded("to be prepared"))
        future.add_done_callback(lambda _: self._discard(entry))  # also if it was cancelled
        self._pump()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            with self._lock:
                left = self._fair.drain()
            for future, _ in left:
                future.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _discard(self, entry: _Entry) -> None:
        with self._lock:
            self._fair.discard(entry)

    def _pump(self) -> None:
        """Start what may be started."""
        while True:
            with self._lock:
                if not self._threads_free:
                    return
                entry = self._fair.pop(lambda c: self._fair.running(c) < self._per_caller)
                if entry is None:
                    return
                self._threads_free -= 1
            future, work = entry.item
            try:
                super().submit(self._run, entry.caller, future, work)
            except RuntimeError as error:  # shut down meanwhile
                self._done(entry.caller, 0.0)
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _run(self, caller: str, future: Future[Any], work: Callable[[], Any]) -> None:
        begun = time.monotonic()
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:
                self._done(caller, time.monotonic() - begun)
                future.set_exception(error)
            else:
                self._done(caller, time.monotonic() - begun)
                future.set_result(result)
        else:
            self._done(caller, 0.0)
        self._pump()

    def _done(self, caller: str, seconds: float) -> None:
        with self._lock:
            self._threads_free += 1
            self._fair.end(caller, seconds)
