"""What every call decoder shares: the reader, the sink, and the moment a call becomes certain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.reader import Malformed, Reader, Steps, Write, discard
from millrace.text.formats.sink import Sink
from millrace.text.formats.values import JSON, ValueDialect, copy_unquoted, copy_value

BLANK = re.compile(r"\s+")
_WORD = re.compile(r"\w+")
_TOOL_NAME = re.compile(r"[\w.\-:/@$]{1,128}\Z")


class Decoding:
    """One attempt to read calls. Until `committed`, a failure leaves nothing behind."""

    def __init__(self, reader: Reader, sink: Sink) -> None:
        self.reader = reader
        self.sink = sink
        self.committed = False
        self.soft = False

    def begin(self, name: str, given_id: str | None = None) -> None:
        """The call is certain. Without real markup around it, only an offered tool is a call."""
        if name not in self.sink.tools and (self.soft or not _TOOL_NAME.match(name)):
            raise Malformed(name)
        self.committed = True
        self.reader.forget()
        self.sink.begin(name, given_id)

    def end(self) -> None:
        self.sink.end()
        self.committed = False

    def schema(self, name: str) -> Mapping[str, Any]:
        tool = self.sink.tools.get(name)
        return tool.parameters if tool is not None else {}

    def write(self, text: str) -> None:
        self.sink.arguments(text)

    def complete(self, closing: str) -> None:
        """Makes the arguments valid JSON after a fault, unless the answer was cut by a limit."""
        if not self.reader.truncated:
            self.write(closing)

    def blanks(self) -> Steps[None]:
        yield from self.reader.run(BLANK, discard)

    def undo(self, position: int) -> None:
        """Returns to `position`, unless the answer was cut: then the rest was half a marker."""
        if self.reader.truncated:
            self.reader.drop_rest()
        else:
            self.reader.back(position)

    def closing(self, *texts: str) -> Steps[None]:
        """Skips blanks and the texts that close a call; where they are missing, nothing."""
        here = self.reader.hold()
        closed = False
        for text in texts:
            yield from self.blanks()
            closed = bool(text) and (yield from self.reader.skip(text))
        self.reader.release(here)
        if not closed:
            self.undo(here)

    def check_arguments(self) -> Steps[None]:
        """Refuses what cannot be arguments, before the call is begun."""
        yield from self.blanks()
        char = yield from self.reader.peek()
        if char not in ("{", '"', "n", "N"):
            raise Malformed(char)

    def arguments(self, dialect: ValueDialect = JSON) -> Steps[None]:
        yield from copy_arguments(self.reader, dialect, self.write, self.complete)

    def text(self) -> Steps[str]:
        """A JSON string's own text."""
        if (yield from self.reader.peek()) != '"':
            raise Malformed("not a string")
        parts: list[str] = []
        yield from copy_unquoted(self.reader, parts.append)
        return "".join(parts)


def copy_arguments(
    reader: Reader, dialect: ValueDialect, write: Write, on_cut: Write | None = None
) -> Steps[None]:
    """An object, or JSON inside a string, or null for no arguments."""
    char = yield from reader.peek()
    if char == "{":
        yield from copy_value(reader, dialect, write, on_cut)
    elif char == '"':
        yield from copy_unquoted(reader, write)
    elif (yield from reader.word(_WORD)) in ("null", "None"):
        write("{}")
    else:
        raise Malformed(char)
