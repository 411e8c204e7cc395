"""Threads that run a program of stages together. The caller is one of them."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from queue import SimpleQueue

from millrace.native import library, stages
from millrace.native.packing import Array

_Driver = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
_Work = tuple[int, int, int, int]
TAKEN, DONE = stages.HEAD.index("taken"), stages.HEAD.index("done")


class Pool:
    """As many threads as there are cores to use; between programs they sleep."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._driver = _Driver(library.shared().address["driver"])
        self._give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        self._runs = itertools.count(1)
        self._work: list[SimpleQueue[_Work]] = [SimpleQueue() for _ in range(threads - 1)]
        self._sent, self._left = 0, [0] * (threads - 1)
        for number in range(1, threads):
            name = f"millrace-native-{number}"
            threading.Thread(target=self._serve, args=(number,), name=name, daemon=True).start()

    def run(self, program: Array) -> None:
        """Carry out a program, whose last stage is waited for.

        Others may still be leaving it then, so its memory must stay until they have (`settle`).
        """
        run = next(self._runs) % 2**31
        program[:, DONE] = 0
        program[:, TAKEN] = run << stages.RUN_BITS
        work = (program.ctypes.data, program.shape[0], program.strides[0], run)
        self._sent += 1
        for queue in self._work:
            queue.put(work)
        self._driver(*work, 0, self._give_way)

    def settle(self) -> None:
        """Wait until nobody but the caller looks at a program."""
        while any(left < self._sent for left in self._left):
            time.sleep(0)

    def _serve(self, number: int) -> None:
        queue = self._work[number - 1]
        while True:
            self._driver(*queue.get(), number, self._give_way)
            self._left[number - 1] += 1
