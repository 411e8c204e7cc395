"""Python's search for garbage, kept from what is there for good.

A full search looks at every object there is. Of those, a server's libraries are most: a tenth of a second,
again and again, in which no stream gets a word.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """All that there is now stays; searches look only at what comes. For the end of a process's start."""
    gc.collect()
    gc.freeze()
