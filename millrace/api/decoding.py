"""JSON bodies of any size, decoded without stopping the streams for long.

The decoder holds the interpreter's lock to its end: about a millisecond for a megabyte of text, but
fifty for one of empty objects. So in a large body the parts are counted first, which needs no lock,
and a body of more parts than anything here has a use for is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.errors import BadRequest

LARGE = 256 * 1024
"""Bytes from which on a body is counted and decoded on a thread."""
MOST_CONTAINERS = 200_000
"""Objects and lists in one body, those within others included."""
MOST_ENTRIES = 2_000_000
"""Values in all of them together."""
_STRETCH = 1 << 20
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING = b"{["


def decode_large(data: bytes) -> Any:
    """As `msgspec.json.decode`, after a look at how much there is. Not for the event loop."""
    containers, entries = count_parts(data)
    for found, most, name in (
        (containers, MOST_CONTAINERS, "objects and lists"),
        (entries, MOST_ENTRIES, "values"),
    ):
        if found > most:
            raise BadRequest(f"The body has more than {most} {name}.")
    return msgspec.json.decode(data)


def count_parts(data: bytes) -> tuple[int, int]:
    """The objects and lists in a document, and about the values in them; stops where it is enough."""
    import numpy as np

    containers = entries = 0
    inside = escaped = False
    for start in range(0, len(data), _STRETCH):
        part = np.frombuffer(data, np.uint8, min(_STRETCH, len(data) - start), start)
        quotes = part == _QUOTE
        slashes = np.flatnonzero(part == _BACKSLASH)
        dead = np.zeros(len(part) + 1, np.bool_)
        if escaped:
            dead[0] = True
        if len(slashes):
            # A backslash takes away the meaning of what follows it, unless it has none itself.
            first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
            run = np.arange(len(slashes)) - np.repeat(first, np.diff(first, append=len(slashes)))
            if escaped and slashes[0] == 0:
                run[: (first[1] if len(first) > 1 else len(slashes))] += 1
            dead[slashes[run % 2 == 0] + 1] = True
        escaped = bool(dead[-1])
        quotes &= ~dead[:-1]
        within = (np.cumsum(quotes, dtype=np.int32) + inside) % 2 == 1
        inside = bool(within[-1])
        outside = part[~within]
        containers += sum(int(np.count_nonzero(outside == c)) for c in _OPENING)
        entries += int(np.count_nonzero(outside == _COMMA)) + 1
        if containers > MOST_CONTAINERS or entries > MOST_ENTRIES:
            break
    return containers, entries
