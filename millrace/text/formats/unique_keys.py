"""The JSON text of one call's arguments on its way out, with every key of an object only once.

Models sometimes write a parameter twice, mostly one right after the other. The later value counts,
as in every JSON parser; but arguments stream, and what was passed on cannot be taken back. So a
short value waits until the next key is known, and a key whose value was already passed on keeps it.
Whether a value waits depends on the text alone, never on chunks, so that a streamed call is the
same as a whole one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from millrace.text.formats.reader import Write

HELD = 16
"""Characters of a parameter's value that wait: most names and numbers, and a few tokens' time."""
_STRING = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
_PLAIN = re.compile(r'[^"{}\[\],:]+')
_BLANKS = re.compile(r"\s+")


@dataclass
class _Member:
    """Where the parts of a member that still waits begin and end in the waiting text."""

    separator: int
    end: int = 0


@dataclass
class _Level:
    """One open object or array, and the keys it has so far."""

    is_object: bool
    held: dict[str, _Member] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    lead: str = ""
    """The blanks before the first member."""
    key: str = ""
    """That of the member being read."""


class UniqueKeys:
    """Passes valid JSON text on in pieces, without the members that a later one replaces."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[str] = []
        self._levels: list[_Level] = []
        self._rest = ""
        self._gap = ""
        self._key: list[str] | None = None
        self._expects_key = False
        self._in_string = False
        self._dropped = 0
        """The depth of the object whose current member is left out."""
        self._size = 0
        self._streams = True
        """What comes is passed on at once."""

    def __call__(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
            else:
                at = self._outside(text, at)
        if self._streams:
            self._flush()

    def end(self) -> None:
        """Passes on all that waits, a beginning that a limit cut off among it."""
        if not self._dropped:
            self._waiting += [self._gap, *(self._key or ()), self._rest]
        self._gap, self._key, self._rest = "", None, ""
        self._flush()

    def _string(self, text: str, at: int) -> int:
        run = _STRING.match(text, at)
        if run is not None:
            self._inside(run.group())
            at = run.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._rest = text[at:]
            return len(text)
        self._in_string = False
        self._inside('"')
        if self._key is not None:
            self._begin_member("".join(self._key))
            self._key = None
        return at + 1

    def _inside(self, text: str) -> None:
        if self._key is not None:
            self._key.append(text)
        else:
            self._put(text, len(text))

    def _outside(self, text: str, at: int) -> int:
        run = _PLAIN.match(text, at)
        if run is not None:
            if self._expects_key:
                self._gap += run.group()
            else:
                self._put(run.group(), len(_BLANKS.sub("", run.group())))
            return run.end()
        char = text[at]
        if char == '"':
            self._in_string = True
            if self._expects_key:
                self._key, self._expects_key = [], False
            self._inside('"')
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif char == "," and self._levels and self._levels[-1].is_object:
            self._end_member()
            self._gap, self._expects_key = ",", True
        else:
            self._put(char, 0 if char == ":" else 1)
        return at + 1

    def _open(self, char: str) -> None:
        self._put(char, 1)
        self._levels.append(_Level(char == "{"))
        self._expects_key = char == "{"
        if len(self._levels) == 1:
            self._flush()
            self._streams = char == "["

    def _close(self, char: str) -> None:
        if self._levels:
            if self._levels[-1].is_object:
                self._end_member()
            self._levels.pop()
        self._put(self._gap.removeprefix(","), 0)
        self._gap, self._expects_key = "", False
        self._put(char, 1)
        self._streams = self._streams or not self._levels

    def _begin_member(self, text: str) -> None:
        level = self._levels[-1]
        level.key = key = json.loads(text)
        gap, self._gap = self._gap, ""
        if not gap.startswith(","):
            level.lead = gap
        if self._dropped:
            return
        if key in level.sent:
            self._dropped = len(self._levels)
            return
        if len(self._levels) == 1 and key not in level.held:
            self._flush()
        self._remove(level, key)
        if not level.sent and not level.held:
            gap = level.lead
        if self._streams:
            level.sent.add(key)
        else:
            level.held[key] = _Member(len(self._waiting))
        self._waiting += [gap, text]

    def _end_member(self) -> None:
        level = self._levels[-1]
        if self._dropped == len(self._levels):
            self._dropped = 0
        elif not self._dropped and level.key in level.held:
            level.held[level.key].end = len(self._waiting)
        if len(self._levels) == 1:
            if self._streams:
                self._flush()
            self._streams, self._size = False, 0

    def _remove(self, level: _Level, key: str) -> None:
        """Takes back an earlier member of this name that still waits."""
        earlier = level.held.pop(key, None)
        if earlier is None:
            return
        first = not level.sent and all(m.separator > earlier.separator for m in level.held.values())
        for index in range(earlier.separator, earlier.end):
            self._waiting[index] = ""
        if first and level.held:
            self._waiting[min(m.separator for m in level.held.values())] = level.lead

    def _put(self, text: str, size: int) -> None:
        if self._dropped:
            return
        self._waiting.append(text)
        if self._levels and not self._streams:
            self._size += size
            if self._size > HELD:
                self._streams = True
                self._flush()

    def _flush(self) -> None:
        text = "".join(self._waiting)
        self._waiting.clear()
        for level in self._levels:
            level.sent.update(level.held)
            level.held.clear()
        if text:
            self._write(text)
