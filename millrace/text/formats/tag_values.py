"""Where a value in tags ends: at its closing tag, or, where that is missing, at what comes next.

A value may hold any text, tags like the family's own among it; what ends one early must look like
the next parameter of the tool, the next call of an offered one, or the end of all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.text.formats.coerce import properties
from millrace.text.formats.decoding import Decoding, plain_name
from millrace.text.formats.reader import Malformed, Steps, Write
from millrace.text.formats.syntax import TaggedCalls

CDATA, CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True)
class ValueEnds:
    """What ends a value: its own marks, and perhaps others."""

    syntax: TaggedCalls
    closes: tuple[str, ...]
    others: tuple[str, ...]
    parameters: Collection[str] = ()
    """Those of the tool; empty where they are not known."""
    escaped: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.closes, *self.others, *self.escaped)


def value_ends(
    state: Decoding, syntax: TaggedCalls, schema: Mapping[str, Any], close: str = ""
) -> ValueEnds:
    """The ends of a value; `close` where its closing tag is another than the family's."""
    closes = (close,) if close else syntax.value_closes
    if syntax.trims:
        closes = (*closes, *("\n" + close for close in closes))
    others = state.anchors if syntax.nested else (*syntax.param_opens, *state.anchors)
    others = (*others, *("\n" + mark for mark in others))
    return ValueEnds(syntax, closes, others, properties(schema), syntax.escaped)


def cdata_ends(syntax: TaggedCalls) -> ValueEnds:
    return ValueEnds(syntax, (CDATA_END,), syntax.value_closes)


def copy_text(state: Decoding, ends: ValueEnds, write: Write) -> Steps[str]:
    """Writes a value's text, and returns the mark that ended it; one not its own is left there."""
    reader = state.reader
    borders = state.patterns(ends.all)
    while True:
        marker = yield from reader.until(borders, write)
        if marker is None:
            raise Malformed("cut off")
        if marker in ends.closes:
            return marker
        if marker in ends.escaped:
            write(ends.escaped[marker])
        elif (yield from _is_end(state, ends, marker.lstrip("\n"))):
            reader.unread(marker)
            return marker
        else:
            write(marker)


def _is_end(state: Decoding, ends: ValueEnds, mark: str) -> Steps[bool]:
    syntax = ends.syntax
    if mark in ends.syntax.value_closes:
        return (yield from _follows(state, (*syntax.param_opens, *syntax.closes)))
    if mark in syntax.param_opens and not syntax.nested:
        return (
            yield from _names(state, (syntax.param_end,), syntax.param_pattern, ends.parameters)
        )
    if mark in (*syntax.opens, *syntax.soft):
        borders = (*syntax.header_end, *syntax.param_opens, *syntax.closes)
        return (yield from _names(state, borders, syntax.name_pattern, state.sink.tools))
    return (yield from _follows(state, state.anchors))


def _follows(state: Decoding, texts: tuple[str, ...]) -> Steps[bool]:
    """Whether one of `texts` comes next, or nothing at all."""
    reader = state.reader
    here = reader.hold()
    yield from state.blanks()
    found = (yield from reader.sees_any(state.patterns(texts))) or reader.exhausted
    reader.back(here)
    reader.release(here)
    return found


def _names(
    state: Decoding, borders: tuple[str, ...], pattern: re.Pattern[str], known: Collection[str]
) -> Steps[bool]:
    """Whether a header comes next, with a name that is known."""
    reader = state.reader
    here = reader.hold()
    try:
        header, marker = yield from state.header(state.borders(borders))
    except Malformed:
        header, marker = "", None
    reader.back(here)
    reader.release(here)
    match = pattern.match(header)
    if marker not in borders or match is None:
        return False
    return not known or plain_name(match.group("name"), known) in known
