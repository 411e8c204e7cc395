"""The bound on worker processes, with workers that are none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millrace.errors import EngineUnavailable
from millrace.serving import pool as module
from millrace.serving.pool import WorkerPool


class _Worker:
    alive = True
    asked = ended = False

    def ask(self, task: Sequence[bytes], patience: float) -> bytes:
        self.asked = True
        return b"reply"

    def kill(self) -> None: ...

    def end(self) -> None:
        self.ended = True


class _Watched(threading.Condition):
    """Looks whenever others may."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __exit__(self, *args: Any) -> None:
        self._look()
        super().__exit__(*args)


def test_a_worker_that_starts_is_counted_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made, counts = _Worker(), list[int]()
    monkeypatch.setattr(module, "_Worker", lambda program: made)
    pool = WorkerPool([], most=1, work="prompt")

    def look() -> None:
        if not made.asked:
            counts.append(len(pool._busy) + pool._starting)

    pool._changed = _Watched(look)
    assert pool.run([b"task"], 60.0) == b"reply"
    assert counts and set(counts) == {1}


def test_a_worker_that_starts_while_the_pool_is_closed_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _Worker()
    pool = WorkerPool([], most=1, work="prompt")

    def started(program: Sequence[str]) -> _Worker:
        pool.close()
        return made

    monkeypatch.setattr(module, "_Worker", started)
    with pytest.raises(EngineUnavailable):
        pool.run([b"task"], 60.0)
    assert made.ended and not made.asked
