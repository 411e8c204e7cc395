"""Returning freed memory to the system.

glibc keeps freed blocks in its arenas: after a burst of large requests a process keeps its peak size until
`malloc_trim` is called. Other C libraries return memory themselves, and nothing is done there.
"""

from __future__ import annotations

import asyncio
import ctypes
import platform
import sys
import time
from collections.abc import Callable

_DELAY = 1.0
"""Seconds between the first request for a trim and the trim, so that several requests share one."""
_PAUSE = 5.0
"""Minimum seconds between two trims: each one takes the allocator's locks."""


def find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where the C library is another one."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found


class HeapTrimmer:
    """Trims the heap on a thread, a moment after it is asked to and not too often."""

    def __init__(
        self,
        trim: Callable[[int], int] | None = None,
        *,
        delay: float = _DELAY,
        pause: float = _PAUSE,
    ) -> None:
        self._trim = trim or find_malloc_trim()
        self._delay = delay
        self._pause = pause
        self._scheduled = False
        self._last = float("-inf")

    def schedule(self) -> None:
        """Trim soon. Call on the event loop."""
        if self._trim is None or self._scheduled:
            return
        self._scheduled = True
        wait = max(self._delay, self._last + self._pause - time.monotonic())
        asyncio.get_running_loop().call_later(wait, self._start)

    def _start(self) -> None:
        assert self._trim is not None
        self._scheduled = False
        self._last = time.monotonic()
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
