"""Threads that run a program of stages together. The caller is one of them."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

from millrace.native import library, stages
from millrace.native.packing import Array

_Driver = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
_Fence = ctypes.CFUNCTYPE(None)
_Work = tuple[Array, int]
TAKEN, DONE = stages.HEAD.index("taken"), stages.HEAD.index("done")
_NOBODY = -1
"""No run has this number."""


class Pool:
    """As many threads as there are cores to use; between programs they sleep."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        code = library.shared().address
        self._driver, self._fence = _Driver(code["driver"]), _Fence(code["fence"])
        self._give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        self._runs = itertools.count(1)
        self._work: list[SimpleQueue[_Work | None]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, queue in enumerate(self._work, 1):
            threading.Thread(
                target=_serve,
                args=(self._driver, queue, number, self._give_way),
                name=f"millrace-native-{number}",
                daemon=True,
            ).start()

    def __del__(self) -> None:
        for queue in getattr(self, "_work", []):
            queue.put(None)

    def retire(self, program: Array) -> None:
        """Nobody takes anything of a program until its next run: its units may be counted anew."""
        program[:, TAKEN] = _NOBODY
        # Seen by others before anything that is written after it.
        self._fence()

    def run(self, program: Array) -> None:
        """Carry out a program, whose last stage is waited for.

        Others may still be leaving it then: they hold on to it, and take nothing of its next run.
        """
        run = next(self._runs) % 2**31
        program[:, DONE] = 0
        self._fence()
        program[:, TAKEN] = run << stages.RUN_BITS
        for queue in self._work:
            queue.put((program, run))
        _drive(self._driver, program, run, 0, self._give_way)


def _serve(
    driver: Callable[..., None], queue: SimpleQueue[_Work | None], number: int, give_way: int
) -> None:
    while (work := queue.get()) is not None:
        _drive(driver, *work, number, give_way)
        del work


def _drive(
    driver: Callable[..., None], program: Array, run: int, thread: int, give_way: int
) -> None:
    driver(program.ctypes.data, len(program), program.strides[0], run, thread, give_way)
