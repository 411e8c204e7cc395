"""A stream of text read by generators that pause where more is needed.

Every step decides on the stream's text alone, never on where a chunk ended, which is what makes
the decoders chunk invariant. Knows nothing of formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from millrace.text.stops import Patterns, Scan

T = TypeVar("T")
Steps = Generator[None, None, T]
Write = Callable[[str], None]

_WINDOW = 4096
_MARKUP = re.compile(r"<|\[/?[A-Z]|\]<\]")
_TOKENS = ("<|", "<｜")
_TOKEN_START = 5
"""Characters of a special token that no text has by chance."""
_WORDLIKE = re.compile(r"[\w\s:.]*\Z")


class Malformed(Exception):
    """The text is not what the decoder took it for."""


def discard(_: str) -> None:
    """A sink for text nobody wants."""


def _half(rest: str, patterns: Patterns) -> bool:
    """Whether the end of an answer is enough of a marker to be nothing else."""
    return any(
        len(rest) >= (_TOKEN_START if marker.startswith(_TOKENS) else max(3, len(marker) / 2))
        and marker.startswith(rest)
        and is_markup(marker)
        for marker in patterns.patterns
    )


def is_markup(marker: str) -> bool:
    """Whether a text looks like nothing but markup."""
    return _MARKUP.match(marker) is not None


def is_wordy(marker: str) -> bool:
    """Whether a text could as well be plain words."""
    return _WORDLIKE.match(marker) is not None


class Reader:
    """The text not yet consumed; positions are absolute, and a held position can be returned to."""

    def __init__(self) -> None:
        self._text = ""
        self._base = 0
        self._past: list[str] = []
        self._holds: list[int] = []
        self.at = 0
        self.ended = False
        self.truncated = False

    def feed(self, text: str) -> None:
        # What is only held lies apart, so that a long hold costs each chunk nothing.
        used = self.at - self._base
        if not self._holds:
            self._past.clear()
        elif used:
            self._past.append(self._text[:used])
        self._text = self._text[used:] + text
        self._base = self.at

    def end(self, truncated: bool) -> None:
        self.ended = True
        self.truncated = truncated

    @property
    def exhausted(self) -> bool:
        return self.ended and self.at == self._base + len(self._text)

    def hold(self) -> int:
        """Keeps the text from here on until `release`, so that `back` may return to it."""
        self._holds.append(self.at)
        return self.at

    def release(self, position: int) -> None:
        if position in self._holds:
            self._holds.remove(position)

    def back(self, position: int) -> None:
        parts = [self._text]
        while position < self._base:
            parts.append(self._past.pop())
            self._base -= len(parts[-1])
        if len(parts) > 1:
            self._text = "".join(reversed(parts))
        self.at = position

    def since(self, position: int) -> str:
        """The text from a held position up to here."""
        at = self.at
        self.back(position)
        self.at = at
        return self._slice(position, at)

    def unread(self, text: str) -> None:
        """Returns to before `text`, which was read last."""
        self.back(self.at - len(text))

    def drop_rest(self) -> None:
        self.at = self._base + len(self._text)

    def peek(self, size: int = 1) -> Steps[str]:
        """The next `size` characters, fewer only at the end of the stream."""
        while True:
            start = self.at - self._base
            found = self._text[start : start + size]
            if len(found) == size or self.ended:
                return found
            yield

    def take(self, size: int = 1) -> Steps[str]:
        found = yield from self.peek(size)
        self.at += len(found)
        return found

    def sees(self, text: str) -> Steps[bool]:
        """Whether `text` comes next; waits no longer than the answer needs."""
        size = 1
        while True:
            found = yield from self.peek(size)
            if not text.startswith(found) or len(found) < size:
                return False
            if size == len(text):
                return True
            size += 1

    def skip(self, text: str) -> Steps[bool]:
        found = yield from self.sees(text)
        if found:
            self.at += len(text)
        return found

    def sees_any(self, patterns: Patterns) -> Steps[bool]:
        """Whether one of `patterns` comes next."""
        state = size = 0
        while True:
            found = yield from self.peek(size + 1)
            following = patterns.next[state].get(found[size]) if len(found) > size else None
            if following is None:
                return False
            state, size = following, size + 1
            if patterns.longest[state] == size:
                return True

    def run(self, pattern: re.Pattern[str], write: Write) -> Steps[None]:
        """Writes characters as they come while the one-character class `pattern` matches them."""
        while True:
            start = self.at - self._base
            match = pattern.match(self._text, start)
            if match is not None and match.end() > start:
                self.at += match.end() - start
                write(match.group())
            if self.at < self._base + len(self._text) or self.ended:
                return
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        parts: list[str] = []
        yield from self.run(pattern, parts.append)
        return "".join(parts)

    def until(self, patterns: Patterns, write: Write) -> Steps[str | None]:
        """Writes text up to the first of `patterns`, consumes that and returns it; None at the end.

        Half a marker at the end of the stream is dropped: it would only have been markup. Where
        nothing cut the stream, it must be half at least.
        """
        scan = Scan(patterns)
        origin = scanned = self.at
        while True:
            fresh = self._slice(scanned, scanned + _WINDOW)
            scanned += len(fresh)
            match = scan.feed(fresh)
            if match is None and scanned < self._base + len(self._text):
                self._write(origin + scan.safe, write)
                continue
            if match is None and self.ended:
                match = scan.finish()
                if match is not None and self.truncated and scan.live <= match.start:
                    match = None
            if match is not None:
                self._write(origin + match.start, write)
                found = self._slice(origin + match.start, origin + match.end)
                self.at = origin + match.end
                return found
            self._write(origin + scan.safe, write)
            if self.ended:
                rest = self._slice(self.at, scanned)
                self.at = scanned
                if rest and not (
                    _half(rest, patterns) if not self.truncated else not is_wordy(rest)
                ):
                    write(rest)
                return None
            yield

    def collect(self, patterns: Patterns) -> Steps[tuple[str, str | None]]:
        """The text up to the first of `patterns`, and which one it was."""
        parts: list[str] = []
        marker = yield from self.until(patterns, parts.append)
        return "".join(parts), marker

    def _slice(self, start: int, end: int) -> str:
        return self._text[start - self._base : end - self._base]

    def _write(self, end: int, write: Write) -> None:
        if end > self.at:
            text = self._slice(self.at, end)
            self.at = end
            write(text)
