"""The JSON text of one call's arguments on its way out.

What is written after a call's own marker, inside a string, may be the string's or the next call's
after a forgotten quote: it waits until that is known. What was cut off is completed here.
"""

from __future__ import annotations

import re

from millrace.text.formats.reader import Write
from millrace.text.stops import Patterns, Scan

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?P<closed>"?)|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def completion(text: str) -> str:
    """What makes the beginning of a JSON object a whole one."""
    stack: list[str] = []
    last = ""
    is_key = open_string = False
    for token in _TOKEN.finditer(text):
        found = token.group()
        open_string = found[0] == '"' and not token.group("closed")
        is_key = bool(stack) and stack[-1] == "}" and last in ("{", ",")
        if found in ("{", "["):
            stack.append("}" if found == "{" else "]")
        elif found in ("}", "]") and stack:
            stack.pop()
        last = found
    if not last:
        return "{}"
    ending = '"' if open_string else ""
    if is_key and last[0] == '"':
        ending += ": null"
    elif last == ":" or (last == "," and stack[-1:] == ["]"]):
        ending += "null"
    return ending + "".join(reversed(stack))


class ArgumentText:
    """Passes a call's arguments on, up to a marker in them; from there on they wait."""

    def __init__(self, write: Write, marks: Patterns) -> None:
        self._write = write
        self._scan: Scan | None = Scan(marks) if marks.patterns else None
        self._said: list[str] = []
        self._held = ""
        self._released = 0
        self._waiting: list[str] = []
        self.suspect = False
        """A marker stands in the arguments."""

    def __call__(self, text: str) -> None:
        if self._scan is None:
            self._pass(text)
        elif self.suspect:
            self._waiting.append(text)
        else:
            self._held += text
            match = self._scan.feed(text)
            border = self._scan.safe if match is None else match.start
            size = border - self._released
            passed, rest = self._held[:size], self._held[size:]
            self._released = border
            self._held = rest
            if passed:
                self._pass(passed)
            if match is not None:
                self.suspect = True
                self._waiting, self._held = [rest], ""

    def end(self) -> None:
        """The call is whole: a marker in it was only text."""
        rest = self._held + "".join(self._waiting)
        if rest:
            self._pass(rest)
        self._held, self._waiting = "", []

    def cut(self, complete: bool) -> None:
        """The call went wrong: what came after a marker was not its own."""
        if complete and self._held:
            self._pass(self._held)
        self._held, self._waiting = "", []
        if complete:
            self._write(completion("".join(self._said)))

    def _pass(self, text: str) -> None:
        self._said.append(text)
        self._write(text)
