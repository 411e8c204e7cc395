"""Worker pools: the bound on processes and the shares of callers, with workers that are no processes."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from millrace import worker_pool as module
from millrace.caller import current_caller
from millrace.errors import EngineUnavailable, Overloaded
from millrace.worker_pool import TaskSize, WorkerPool


class _Worker:
    alive = True
    asked = ended = False
    running = 0
    most = 0
    order: list[bytes]
    lock = threading.Lock()
    go_on = threading.Event()

    def __init__(self, program: Sequence[str], nicer: int) -> None:
        pass

    def ask(self, task: Sequence[bytes], patience: float) -> bytes:
        cls = type(self)
        self.asked = True
        with cls.lock:
            cls.running += 1
            cls.most = max(cls.most, cls.running)
            cls.order.append(task[0])
        assert cls.go_on.wait(30)
        with cls.lock:
            cls.running -= 1
        return b"reply"

    def kill(self) -> None: ...

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[_Worker]:
    class Fresh(_Worker):
        order: list[bytes] = []  # noqa: RUF012
        go_on = threading.Event()

    monkeypatch.setattr(module, "_Worker", Fresh)
    return Fresh


def asked(
    threads: ThreadPoolExecutor, pool: WorkerPool, caller: str, task: bytes, size: float = 0.0
) -> Future[bytes | memoryview]:
    def work() -> bytes | memoryview:
        current_caller.set(caller)
        return pool.run([task], 60.0, TaskSize("test", size))

    return threads.submit(contextvars.copy_context().run, work)


def until(true: object) -> None:
    deadline = time.monotonic() + 30
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_caller_gets_a_process_though_another_has_filled_its_own(workers: type[_Worker]) -> None:
    pool = WorkerPool([], most=2, work="prompt")
    with ThreadPoolExecutor(16) as threads:
        crowd = [asked(threads, pool, "a", b"a%d" % i) for i in range(12)]
        until(lambda: workers.running == 2)
        alone = asked(threads, pool, "b", b"b")
        until(lambda: workers.running == 3)
        assert workers.order[2] == b"b"
        workers.go_on.set()
        assert all(f.result(30) == b"reply" for f in (*crowd, alone))
    assert workers.most == 3


def test_what_a_caller_has_waiting_is_bounded_and_others_have_places(
    workers: type[_Worker],
) -> None:
    pool = WorkerPool([], most=1, work="prompt")
    with ThreadPoolExecutor(40) as threads:
        crowd = [asked(threads, pool, "a", b"a") for _ in range(24)]
        until(lambda: sum(f.done() for f in crowd) == 7)  # 16 wait, one runs
        others = [asked(threads, pool, f"b{i}", b"b") for i in range(4)]
        time.sleep(0.05)
        workers.go_on.set()
        assert [f.result(30) for f in others] == [b"reply"] * 4
    refused = [f for f in crowd if f.exception() is not None]
    assert len(refused) == 7
    assert all(isinstance(f.exception(), Overloaded) for f in refused)


def test_of_one_callers_tasks_the_short_ones_go_first(workers: type[_Worker]) -> None:
    pool = WorkerPool([], most=1, work="prompt")
    pool._rates["test"] = 100.0
    with ThreadPoolExecutor(8) as threads:
        first = asked(threads, pool, "a", b"first")
        until(lambda: workers.running == 1)
        rest = []
        for task, size in ((b"long", 9.0), (b"middle", 3.0), (b"short", 1.0)):
            rest.append(asked(threads, pool, "a", task, size))
            until(lambda: pool._gate._queue.waiting("a") == len(rest))
        workers.go_on.set()
        for future in (first, *rest):
            future.result(30)
    assert workers.order == [b"first", b"short", b"middle", b"long"]


def test_a_worker_that_starts_while_the_pool_is_closed_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _Worker([], 0)
    pool = WorkerPool([], most=1, work="prompt")

    def started(program: Sequence[str], nicer: int) -> _Worker:
        pool.close()
        return made

    monkeypatch.setattr(module, "_Worker", started)
    with pytest.raises(EngineUnavailable):
        pool.run([b"task"], 60.0)
    assert made.ended and not made.asked


def test_those_that_wait_hear_that_the_pool_is_closed(workers: type[_Worker]) -> None:
    pool = WorkerPool([], most=1, work="prompt")
    with ThreadPoolExecutor(8) as threads:
        held = [asked(threads, pool, "a", b"a") for _ in range(4)]
        until(lambda: workers.running == 1)
        pool.close()
        until(lambda: sum(f.done() for f in held) == 3)
        workers.go_on.set()
        assert sum(isinstance(f.exception(30), EngineUnavailable) for f in held) == 3
