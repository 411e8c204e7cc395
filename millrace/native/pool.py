"""Threads that run a program of stages together. The caller is one of them."""

from __future__ import annotations

import ctypes
import threading
from queue import SimpleQueue

import numpy as np

from millrace.native import library
from millrace.native.packing import Array, aligned

_Driver = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)


class Pool:
    """As many threads as there are cores to use; between programs they sleep."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._driver = _Driver(library.shared().address["driver"])
        self._give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        self._arrived = aligned((8,), np.int64)
        self._before = 0
        self._work: list[SimpleQueue[tuple[int, int, int, int]]] = []
        for number in range(1, threads):
            queue: SimpleQueue[tuple[int, int, int, int]] = SimpleQueue()
            name = f"millrace-native-{number}"
            threading.Thread(
                target=self._serve, args=(queue, number), name=name, daemon=True
            ).start()
            self._work.append(queue)

    def run(self, program: Array) -> None:
        """Carry out a program, whose last stage is waited for."""
        stages, fields = program.shape
        work = (program.ctypes.data, stages, fields * program.itemsize, self._before)
        for queue in self._work:
            queue.put(work)
        self._call(work, 0)
        self._before += int(program[-1, library.WAITS]) * self.threads

    def _serve(self, queue: SimpleQueue[tuple[int, int, int, int]], number: int) -> None:
        while True:
            self._call(queue.get(), number)

    def _call(self, work: tuple[int, int, int, int], number: int) -> None:
        program, stages, size, before = work
        arrived = self._arrived.ctypes.data
        self._driver(program, stages, size, arrived, before, self.threads, number, self._give_way)
