"""What every call decoder shares: the reader, the sink, and the moment a call becomes certain."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from millrace.text.formats.arguments import ArgumentText
from millrace.text.formats.coerce import as_object
from millrace.text.formats.reader import Malformed, Reader, Steps, Write, discard
from millrace.text.formats.sink import Sink
from millrace.text.formats.unique_keys import UniqueKeys
from millrace.text.formats.values import JSON, PYTHON, ValueDialect, copy_unquoted, copy_value
from millrace.text.stops import Patterns

QUOTES = ('"', "'")
PARAGRAPH = "\n\n"
"""What a broken call ends at, in families without a closing mark."""
BLANK = re.compile(r"\s+")
_TOOL_NAME = re.compile(r"[\w.\-:/@$]{1,128}\Z")
_LONGEST_TEXT = 512
"""More characters than any name, id or key of a call has."""
_MOST_RETURNS = 32
"""How often an answer's text may be read again after a fault, so that reading stays linear."""
_SURPLUS = re.compile(r"[}\])\s]+")


class Decoding:
    """One attempt to read calls. Until `committed`, a failure leaves nothing behind."""

    recovers = True
    """After a call that went wrong, the next one is looked for."""

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        anchors: tuple[str, ...] = (),
        marks: Patterns | None = None,
    ) -> None:
        self.reader = reader
        self.sink = sink
        self.committed = False
        self.soft = False
        self.begun_at = 0
        """Where the arguments of the last call began."""
        self.marks = marks or Patterns([])
        """Texts that are no part of arguments, unless in a string that is closed after all."""
        self.anchors = anchors
        """Those of them that open or close calls."""
        self._patterns: dict[tuple[str, ...], Patterns] = {}
        self._returns = 0
        self._keep(discard)

    def begin(self, name: str, given_id: str | None = None) -> None:
        """The call is certain. Without real markup around it, only an offered tool is a call."""
        name = plain_name(name, self.sink.tools)
        if name not in self.sink.tools and (self.soft or not _TOOL_NAME.match(name)):
            raise Malformed(name)
        self.committed = True
        self.begun_at = self.reader.at
        self._open(name, given_id)

    def swallow(self) -> None:
        """Begins a call that means nothing to a client."""
        self.committed = True
        self.begun_at = self.reader.at
        self.sink.swallow()
        self._keep(self.sink.arguments)

    def _open(self, name: str, given_id: str | None) -> None:
        self.sink.begin(name, given_id)
        self._keep(self.sink.arguments)

    def _keep(self, write: Write) -> None:
        """Makes `write` the place for the arguments of the call that begins."""
        self._keys = UniqueKeys(write)
        self._arguments = ArgumentText(self._keys, self.marks)

    def write(self, text: str) -> None:
        self._arguments(text)

    def end(self) -> None:
        self._arguments.end()
        self._keys.end()
        self._close()

    def cut(self) -> None:
        """Ends a call that went wrong, as valid JSON unless the answer was cut by a limit."""
        self._arguments.cut(not self.reader.truncated)
        self._keys.end()
        self._close()

    def _close(self) -> None:
        self.sink.end()
        self.committed = False

    def suspect(self) -> bool:
        """Whether a marker stands in the arguments written so far."""
        return self._arguments.suspect

    def may_return(self) -> bool:
        self._returns += 1
        return self._returns <= _MOST_RETURNS

    def patterns(self, texts: tuple[str, ...]) -> Patterns:
        if texts not in self._patterns:
            self._patterns[texts] = Patterns(texts)
        return self._patterns[texts]

    def borders(self, texts: tuple[str, ...]) -> Patterns:
        """`texts`, and all that opens or closes a call."""
        return self.patterns((*texts, *self.anchors))

    def recover(self, openings: tuple[str, ...] = ()) -> Steps[str | None]:
        """After a fault in a call: goes on right before the next marker, and says which.

        It may stand in what was taken for the call's arguments. `openings` are markers as well.
        """
        reader = self.reader
        if self.may_return():
            reader.back(self.begun_at)
        found = yield from reader.until(self.borders(openings), discard)
        if found is not None:
            reader.unread(found)
        return found

    def surplus(self, fence: str = "", unclosed: bool = False) -> Steps[None]:
        """Skips brackets too many after a call, where its end or the rest of it follows them.

        `unclosed`: the list that the call stands in goes on.
        """
        reader = self.reader
        here = reader.hold()
        brackets = yield from reader.word(_SURPLUS)
        ends = yield from self._ends_with(fence)
        if not ends and not self.soft:
            ends = (yield from reader.sees_any(self.marks)) or reader.exhausted
            rest = not ends and (unclosed or brackets.strip() != "")
            if rest and (yield from reader.peek()) in (",", *QUOTES):
                found = yield from reader.until(self.borders((PARAGRAPH,)), discard)
                reader.unread(found or "")
                ends = True
        reader.release(here)
        if not ends:
            self.undo(here)

    def settle(self) -> None:
        """A call was certain: what follows it in its list is a call too, of whatever tool."""
        self.soft = False

    def empty_list(self) -> Steps[bool]:
        """Skips the end of a list with nothing in it: between a family's marks, no call at all."""
        return not self.soft and (yield from self.reader.skip("]"))

    def another(self, call: Steps[None], here: int) -> Steps[bool]:
        """Reads one more call; where it is none after all, returns to `here`, and False."""
        reader = self.reader
        retry = reader.hold()
        try:
            yield from call
        except Malformed:
            reader.release(retry)
            if self.committed or reader.truncated:
                raise
            reader.back(here)
            return False
        reader.release(retry)
        return True

    def schema(self, name: str) -> Mapping[str, Any]:
        tool = self.sink.tools.get(plain_name(name, self.sink.tools))
        return tool.parameters if tool is not None else {}

    def blanks(self) -> Steps[None]:
        yield from self.reader.run(BLANK, discard)

    def undo(self, position: int) -> None:
        """Returns to `position`, unless the answer was cut: then the rest was half a marker."""
        if self.reader.truncated:
            self.reader.drop_rest()
        else:
            self.reader.back(position)

    def _ends_with(self, text: str) -> Steps[bool]:
        """Whether `text` comes next, and is not the beginning of another call's mark."""
        if not text or not (yield from self.reader.sees(text)):
            return False
        other = yield from self.reader.sees_any(self.patterns(self.anchors))
        return not other or text in self.anchors

    def closing(self, *texts: str) -> Steps[None]:
        """Skips blanks and the texts that close a call; where they are missing, nothing."""
        here = self.reader.hold()
        closed = False
        for text in texts:
            yield from self.blanks()
            closed = (yield from self._ends_with(text)) and (yield from self.reader.skip(text))
        self.reader.release(here)
        if not closed:
            self.undo(here)

    def check_arguments(self) -> Steps[None]:
        """Refuses what cannot be arguments, before the call is begun."""
        yield from self.blanks()
        char = yield from self.reader.peek()
        if char in ("{", *QUOTES):
            return
        if char in ("n", "N") and (yield from self.reader.peek(4)) in ("null", "None"):
            return
        if self.soft or not (char in ("[", "-") or char.isdigit() or char in set("tfTF")):
            raise Malformed(char)

    def arguments(self, name: str, dialect: ValueDialect = JSON) -> Steps[None]:
        """The arguments of a call that has begun, as an object, whatever they are written as."""
        char = yield from self.reader.peek()
        if char == "{":
            yield from self._object(self.reader, dialect)
        elif char in QUOTES:
            yield from self._quoted(name)
        else:
            parts: list[str] = []
            yield from copy_value(self.reader, dialect, parts.append)
            self.write(as_object("".join(parts), self.schema(name)))

    def _object(self, reader: Reader, dialect: ValueDialect) -> Steps[None]:
        if dialect is JSON:
            dialect = yield from spelling(reader)
        yield from copy_value(reader, dialect, self.write, self.suspect)

    def _quoted(self, name: str) -> Steps[None]:
        """JSON inside a string: an object streams, the rest is read whole."""
        inner = Reader()
        steps = self._unquoted(inner, name)

        def pass_on(text: str) -> None:
            inner.feed(text)
            next(steps, None)

        yield from copy_unquoted(self.reader, pass_on)
        inner.end(False)
        next(steps, None)

    def _unquoted(self, inner: Reader, name: str) -> Steps[None]:
        parts: list[str] = []
        yield from inner.run(BLANK, parts.append)
        if (yield from inner.peek()) == "{":
            yield from self._object(inner, JSON)
        else:
            yield from inner.until(Patterns([]), parts.append)
            self.write(as_object(json.dumps("".join(parts)), self.schema(name)))

    def text(self) -> Steps[str]:
        """A string's own text, in either quotes."""
        if (yield from self.reader.peek()) not in QUOTES:
            raise Malformed("not a string")
        parts = _ShortText()
        yield from copy_unquoted(self.reader, parts)
        return parts.text

    def name(self) -> Steps[str]:
        """A tool's name in quotes; without markup around it, given up once it is no offered one."""
        if (yield from self.reader.peek()) not in QUOTES:
            raise Malformed("not a string")
        parts = _ShortText(tuple(self.sink.tools) if self.soft else None)
        yield from copy_unquoted(self.reader, parts)
        return parts.text

    def header(self, ends: Patterns) -> Steps[tuple[str, str | None]]:
        """The text up to the first of `ends`, and which one; too long a one is no header."""
        parts = _ShortText()
        marker = yield from self.reader.until(ends, parts)
        return parts.text, marker


def plain_name(name: str, known: Collection[str]) -> str:
    """The offered tool that a name means: `functions.ping` and `ping.ping` are `ping`.

    Families that group tools write a tool of no group as a group of its own name.
    """
    group, _, own = name.partition(".")
    return own if name not in known and own in known and group in ("functions", own) else name


def spelling(reader: Reader) -> Steps[ValueDialect]:
    """JSON, unless the value here is in single quotes."""
    here = yield from reader.peek()
    if here == "{":
        here = (yield from reader.peek(2))[1:]
    return PYTHON if here == "'" else JSON


class _ShortText:
    """Collects what cannot be long, or must be one of some texts."""

    def __init__(self, options: tuple[str, ...] | None = None) -> None:
        self.text = ""
        self._options = options

    def __call__(self, part: str) -> None:
        self.text += part
        if len(self.text) > _LONGEST_TEXT:
            raise Malformed("too long")
        if self._options is not None and not any(o.startswith(self.text) for o in self._options):
            raise Malformed(self.text)
