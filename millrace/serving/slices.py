"""Long loops on the event loop, cut into slices so that other requests are served in between.

A request may bring thousands of prompts. What each of them costs is small, and all of them in one go would
leave streams and health checks without an answer for as long as that takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

log = logging.getLogger("millrace.serving")
T = TypeVar("T")

SLICE = 0.002
"""Seconds of work after which the event loop gets a turn; a small request takes about ten turns."""


class SlicePace:
    """Gives the event loop a turn whenever a coroutine has worked for one slice."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def rest(self) -> None:
        if time.monotonic() - self._since > SLICE:
            await asyncio.sleep(0)
            self._since = time.monotonic()


def in_slices(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Call `work` for each item: the first slice now, the others in later turns of the event loop."""
    left = iter(items)

    def next_slice() -> None:
        end = time.monotonic() + SLICE
        for item in left:
            try:
                work(item)
            except Exception:  # one item's fault does not leave the others undone
                log.exception("a part of a list failed")
            if time.monotonic() > end:
                asyncio.get_running_loop().call_soon(next_slice)
                return

    next_slice()
