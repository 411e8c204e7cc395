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
_Work = tuple[Array, int]
TAKEN, DONE = stages.HEAD.index("taken"), stages.HEAD.index("done")
_NOBODY = -1
"""No run has this number."""


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

    def retire(self, program: Array) -> None:
        """Nobody takes anything of a program until its next run: its units may be counted anew."""
        program[:, TAKEN] = _NOBODY

    def run(self, program: Array) -> None:
        """Carry out a program, whose last stage is waited for.

        Others may still be leaving it then, so its memory must stay until they have (`settle`).
        """
        run = next(self._runs) % 2**31
        program[:, DONE] = 0
        program[:, TAKEN] = run << stages.RUN_BITS
        self._sent += 1
        for queue in self._work:
            queue.put((program, run))
        self._drive(program, run, 0)

    def settle(self) -> None:
        """Wait until nobody but the caller looks at a program."""
        while any(left < self._sent for left in self._left):
            time.sleep(0)

    def _serve(self, number: int) -> None:
        queue = self._work[number - 1]
        while True:
            self._drive(*queue.get(), number)
            self._left[number - 1] += 1

    def _drive(self, program: Array, run: int, thread: int) -> None:
        at, size = program.ctypes.data, program.strides[0]
        self._driver(at, len(program), size, run, thread, self._give_way)
