"""Python's search for garbage, kept from what is there for good.

A full search looks at every object there is. Of those, a server's libraries are most: a tenth of a second,
again and again, in which no stream gets a word. What is left, two hundred requests say, takes a slow core
15 to 30 ms.
"""

from __future__ import annotations

import gc

_SEARCHES = 100
"""Searches among what is younger before a full one: Python's own ten are over while a crowd comes in."""


def settle() -> None:
    """All that there is now stays; searches look only at what comes, and are seldom full. For the end of a
    process's start."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _SEARCHES)
