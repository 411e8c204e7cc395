"""JSON bodies of any size, decoded without stopping the streams for long.

The decoder holds the interpreter's lock to its end: about a millisecond for a megabyte of text, but
fifty for one of empty objects. So in a large body the parts are counted first, which needs no lock,
and a body of more parts than anything here has a use for is refused. What is long in it are its texts:
they are cut out, decoded a piece at a time, and put back.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from millrace.errors import BadRequest

Data = bytes | bytearray
LARGE = 64 * 1024
"""Bytes from which on a body is counted and decoded on a thread."""
MOST_CONTAINERS = 100_000
"""Objects and lists in one body, those within others included."""
MOST_ENTRIES = 2_000_000
"""Values in all of them together."""
MOST_NAMES = 300_000
"""Fields of all objects together: each has a name to be decoded and looked up."""
_STRETCH = 1 << 20
_LONG = 16 * 1024
"""Bytes from which on a text is decoded by itself."""
_MANY = 20_000
"""Values among which texts are not looked for: that would take longer than it spares."""
_PIECE = 128 * 1024
"""Bytes that are decoded while nobody else can run."""
_LOOK_BACK = 4096
"""Bytes among which a place to cut is looked for, and what follows a text."""
_PAIR = 12
"""Bytes of the longest escape, that of a character in two halves."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING = b"{["


class LongText(NamedTuple):
    """Where one stands in a document, between its quotes."""

    start: int
    end: int


class BodyParts(NamedTuple):
    containers: int
    """Objects and lists."""
    entries: int
    """About as many values are in them."""
    names: int
    """Fields of objects."""
    long: list[LongText]


def decode_large(data: Data) -> tuple[Any, int]:
    """As `msgspec.json.decode`, after a look at how much there is, and how many objects and lists that are.
    Not for the event loop."""
    parts = count_parts(data)
    for found, most, name in (
        (parts.containers, MOST_CONTAINERS, "objects and lists"),
        (parts.entries, MOST_ENTRIES, "values"),
        (parts.names, MOST_NAMES, "fields"),
    ):
        if found > most:
            raise BadRequest(f"The body has more than {most} {name}.")
    long = [span for span in parts.long if not _is_name(data, span)]
    if long and parts.entries <= _MANY:
        # Where it is malformed, decoding the whole tells where.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _in_pieces(data, long), parts.containers
    return msgspec.json.decode(data), parts.containers


def count_parts(data: Data) -> BodyParts:
    """What is in a document; stops where it is enough."""
    import numpy as np

    containers = entries = names = opened = 0
    long: list[LongText] = []
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
        bounds = np.flatnonzero(quotes) + start
        if inside:
            bounds = np.concatenate([[opened], bounds])
        opens, closes = bounds[0::2], bounds[1::2]
        for i in np.flatnonzero(closes - opens[: len(closes)] > _LONG):
            long.append(LongText(int(opens[i]) + 1, int(closes[i])))
        if len(opens) > len(closes):
            opened = int(opens[-1])
        within = (np.cumsum(quotes, dtype=np.int32) + inside) % 2 == 1
        inside = bool(within[-1])
        outside = part[~within]
        containers += sum(int(np.count_nonzero(outside == c)) for c in _OPENING)
        entries += int(np.count_nonzero(outside == _COMMA)) + 1
        names += int(np.count_nonzero(outside == _COLON))
        if containers > MOST_CONTAINERS or entries > MOST_ENTRIES or names > MOST_NAMES:
            break
    return BodyParts(containers, entries, names, long)


def _is_name(data: Data, span: LongText) -> bool:
    """Whether the text is the name of a field."""
    return data[span.end + 1 : span.end + 1 + _LOOK_BACK].lstrip(b" \t\r\n")[:1] in (b":", b"")


def _in_pieces(data: Data, long: list[LongText]) -> Any:
    """The document, its long texts decoded by themselves. Raises where it is malformed."""
    mark = os.urandom(16).hex()  # nobody can have written it into the document
    rest: list[Data] = []
    texts: dict[str, str] = {}
    at = 0
    for number, span in enumerate(long):
        name = f"{mark}{number}"
        rest += [data[at : span.start], name.encode()]
        texts[name] = _text(data, span)
        at = span.end
    value = msgspec.json.decode(b"".join([*rest, data[at:]]))
    return _put_back(value, texts)


def _text(data: Data, span: LongText) -> str:
    pieces: list[str] = []
    at = span.start
    while at < span.end:
        end = _cut(data, at, min(at + _PIECE, span.end), span.end)
        pieces.append(msgspec.json.decode(b'"%b"' % bytes(data[at:end]), type=str))
        at = end
        time.sleep(0)  # others first
    return "".join(pieces)


def _cut(data: Data, start: int, wanted: int, end: int) -> int:
    """Where a text may be cut, not within a character: near where it is wanted, else at its end."""
    if wanted >= end:
        return end
    for at in range(wanted, max(start, wanted - _LOOK_BACK), -1):
        if data[at] == _BACKSLASH:
            if data[at - 1] != _BACKSLASH and not _is_half(data[max(start, at - 6) : at]):
                return at
        elif data[at] & 0xC0 != 0x80 and _BACKSLASH not in data[max(start, at - _PAIR) : at]:
            return at
    return end


def _is_half(escape: Data) -> bool:
    """Whether this is the first half of a character in two."""
    return escape[:2] == b"\\u" and escape[2:4].lower() in (b"d8", b"d9", b"da", b"db")


def _put_back(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, str):
        return texts.get(value, value)
    level = [value]
    while level:
        holder = level.pop()
        if not isinstance(holder, dict | list):
            continue
        for place, inner in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(inner, str):
                if inner in texts:
                    holder[place] = texts[inner]
            else:
                level.append(inner)
    return value
