"""Threads that leave the processor to others of their process. Knows nothing of what they do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICER = 10


def yield_to_others() -> None:
    """Have the calling thread run beside the others and not instead of them, where a thread can be nicer
    than its process: only Linux counts threads one by one."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        mine = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, mine + _NICER)
