"""A format's markers sorted by what they mean, for one set of offered tools.

Made once and shared by all parsers of a model; the machine looks markers up here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from millrace.text.formats.decoding import PARAGRAPH
from millrace.text.formats.json_calls import json_openings
from millrace.text.formats.pythonic import python_openings
from millrace.text.formats.reader import is_markup, is_wordy
from millrace.text.formats.syntax import (
    CallSyntax,
    HeaderCalls,
    JsonCalls,
    OutputFormat,
    PythonCalls,
    TaggedCalls,
)
from millrace.text.stops import Patterns


class Tables:
    """A format's markers sorted by what they mean, for one set of offered tools."""

    def __init__(self, format: OutputFormat, tools: tuple[str, ...]) -> None:
        self.opens: dict[str, list[CallSyntax]] = {}
        self.soft: dict[str, list[CallSyntax]] = {}
        self.start: dict[str, list[CallSyntax]] = {}
        self.again: dict[str, list[CallSyntax]] = {}
        """How calls begin inside markup whose first call was none."""
        self.inner: set[str] = set()
        closes: set[str] = set()
        soft_closes: set[str] = set()
        fields: set[str] = set()
        for syntax in format.calls:
            for marker in syntax.opens:
                self.opens.setdefault(marker, []).append(syntax)
            (closes if syntax.opens else soft_closes).update(syntax.closes)
            for marker in _soft_markers(syntax, tools):
                self.soft.setdefault(marker, []).append(syntax)
            if tools and isinstance(syntax, JsonCalls):
                for char in syntax.start:
                    self.start.setdefault(char, []).append(syntax)
            if tools and isinstance(syntax, JsonCalls | PythonCalls):
                for marker in _openings(syntax, tools):
                    self.again.setdefault(marker, []).append(syntax)
            if tools and isinstance(syntax, PythonCalls) and syntax.bare:
                self.start.setdefault("[", []).append(syntax)
            if syntax.opens and isinstance(syntax, TaggedCalls):
                parts = (*syntax.param_opens, syntax.value_open, *syntax.value_closes)
                self.inner.update(filter(is_markup, parts))
            if syntax.opens and isinstance(syntax, HeaderCalls):
                fields.update(filter(is_markup, syntax.fields))
        self.inner |= fields
        thought = format.thought
        self.thought_opens = frozenset(thought.opens if thought else ())
        self.thought_closes = frozenset(thought.closes if thought else ())
        drops = {*format.drops, *closes, *self.thought_closes, *fields} - {""}
        outside = {m for m in self.soft if not inside_call(m, self.soft[m])}
        section = {m.strip() for s in format.calls for m in getattr(s, "section", None) or ()}
        messages = format.messages
        ends = (messages.start, *messages.ends) if messages is not None else ()
        anchors = {*self.opens, *closes, *soft_closes, *outside, *section, *ends} - {""}
        self.anchors = tuple(sorted(m for m in anchors if not is_wordy(m)))
        """What opens or closes calls, to find the next one by when one is broken."""
        spelled = {s.dialect.delimiter for s in format.calls if isinstance(s, HeaderCalls)}
        others = drops - spelled - self.inner - anchors
        if any(isinstance(s, PythonCalls) for s in format.calls):
            others |= {f"){gap}{name}(" for name in tools for gap in (", ", "\n")}
        self.marks = Patterns([*self.anchors, *sorted(others)])
        """What is no part of arguments, except where a string that is closed holds it."""
        self.ignored = Patterns([*sorted(drops - self.inner), *ends])
        """What may be left over beside a call without any markup."""
        self.tails = format.tails
        self.content = Patterns([*self.opens, *self.soft, *self.thought_opens, *drops, *self.tails])
        self.resets = {s.fence for s in format.calls if isinstance(s, JsonCalls | PythonCalls)}
        self.resets = (self.resets | {PARAGRAPH}) - {"", *self.content.patterns}
        """Plain texts after which broken markup is over."""
        self.retry = Patterns([*self.content.patterns, *self.again, *self.resets])
        """Content after a text that could have begun a call."""
        self.broken = Patterns([*self.retry.patterns, *sorted(self.inner)])
        """Content inside markup that is no call's after all."""
        opens = list(self.opens) if tools else []
        closing = (self.thought_opens | self.thought_closes | format.drops) - {""}
        self.thought = Patterns([*opens, *closing, *self.tails])
        self.broken_thought = Patterns([*self.thought.patterns, *self.again])


def _openings(syntax: JsonCalls | PythonCalls, tools: Iterable[str]) -> tuple[str, ...]:
    if isinstance(syntax, JsonCalls):
        return json_openings(syntax, tools)
    return python_openings(tools)


def inside_call(marker: str, syntaxes: Iterable[CallSyntax]) -> bool:
    """Whether a soft marker is part of the call itself, not markup before it."""
    return any(
        marker not in syntax.soft or (isinstance(syntax, JsonCalls) and syntax.soft_inside)
        for syntax in syntaxes
    )


@lru_cache(maxsize=128)
def tables(format: OutputFormat, tools: tuple[str, ...]) -> Tables:
    return Tables(format, tools)


def _soft_markers(syntax: CallSyntax, tools: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(syntax, HeaderCalls) and syntax.content_name is not None:
        return syntax.soft
    if not tools:
        return ()
    if isinstance(syntax, HeaderCalls) and syntax.bare:
        return (*syntax.soft, *(f"{lead}{name}{{" for lead in syntax.bare for name in tools))
    if isinstance(syntax, PythonCalls) and syntax.bare:
        return (*syntax.soft, *(f"[{name}(" for name in tools))
    return syntax.soft
