"""xgrammar's structural tags, in which gateways say what calls and answers look like, as a grammar.

A tag is a piece of JSON: texts, schemas, sequences and choices of them, tags with a beginning and an
end, and free text in which a trigger opens one. What cannot be enforced is refused by its type.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.errors import BadRequest, Unsupported
from millrace.text.grammar.lark import Builder, pattern, refuse_long
from millrace.text.grammar.outputs import from_grammar, from_regex
from millrace.text.grammar.schema import enforceable, problem_of

_DEEPEST = 64
_MOST_TAGS = 1000
_ANYTHING = r"(.|\n)*"


def structural_grammar(text: Any, tokens: Mapping[str, int], param: str) -> str:
    """The grammar of a structural tag; `tokens` are the markers that no text spells."""
    if not isinstance(text, str):
        raise BadRequest(f"'{param}' must be the text of a structural tag.", param=param)
    refuse_long(len(text), param)
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"'{param}' is not valid JSON: {error}.", param=param) from None
    build = Builder(tokens)
    writer = _Writer(build, param)
    build.rule("start", writer.write(_format_of(tag, param)))
    grammar = build.build()
    if (problem := problem_of(grammar)) is not None:
        reason = " ".join(problem.split())
        raise BadRequest(f"'{param}' cannot be enforced: {reason[:300]}.", param=param)
    return grammar


def _format_of(tag: Any, param: str) -> Any:
    """What the tag holds, in its present form or the one before it."""
    if isinstance(tag, Mapping) and "format" in tag:
        return tag["format"]
    if isinstance(tag, Mapping) and isinstance(tag.get("structures"), list):
        return {
            "type": "triggered_tags",
            "triggers": tag.get("triggers"),
            "tags": [
                {
                    "begin": s.get("begin"),
                    "content": {"type": "json_schema", "json_schema": s.get("schema", True)},
                    "end": s.get("end"),
                }
                for s in tag["structures"]
                if isinstance(s, Mapping)
            ],
        }
    raise BadRequest(f"'{param}' must be an object with a 'format'.", param=param)


class _Writer:
    def __init__(self, build: Builder, param: str) -> None:
        self._build = build
        self._param = param
        self._numbers = itertools.count()
        self._depth = 0
        self._kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": lambda f: self._literal(f, "value"),
            "json_schema": self._schema,
            "regex": lambda f: self._build.entry(from_regex(f.get("pattern"), self._param)),
            "grammar": lambda f: self._build.entry(from_grammar(f.get("grammar"), self._param)),
            "any_text": self._any_text,
            "sequence": lambda f: self._sequence(self._list(f, "elements")),
            "or": lambda f: self._either(map(self.write, self._list(f, "elements"))),
            "optional": lambda f: f"({self.write(f.get('content'))})?",
            "star": lambda f: f"({self.write(f.get('content'))})*",
            "plus": lambda f: f"({self.write(f.get('content'))})+",
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, format: Any) -> str:
        """An expression for one format, in a rule of its own."""
        kind = format.get("type") if isinstance(format, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise Unsupported(
                f"'{self._param}' has a format of the type {str(kind)[:60]!r}; supported are "
                f"{', '.join(self._kinds)}.",
                param=self._param,
            )
        self._depth += 1
        if self._depth > _DEEPEST:
            raise BadRequest(f"'{self._param}' is nested too deeply.", param=self._param)
        expression = self._kinds[kind](format)
        self._depth -= 1
        return self._rule(expression)

    def _rule(self, expression: str) -> str:
        return self._build.rule(self._name(), expression or '""')

    def _name(self) -> str:
        return f"part_{next(self._numbers)}"

    def _either(self, expressions: Any) -> str:
        return " | ".join(expressions)

    def _text(self, format: Mapping[str, Any], field: str) -> str:
        value = format.get(field)
        if not isinstance(value, str):
            raise BadRequest(f"'{self._param}' has a '{field}' that is no text.", param=self._param)
        return value

    def _literal(self, format: Mapping[str, Any], field: str) -> str:
        return self._build.literal(self._text(format, field))

    def _list(self, format: Mapping[str, Any], field: str) -> list[Any]:
        value = format.get(field)
        if not isinstance(value, list) or not value or len(value) > _MOST_TAGS:
            raise BadRequest(
                f"'{self._param}' must have 1 to {_MOST_TAGS} '{field}'.", param=self._param
            )
        return value

    def _schema(self, format: Mapping[str, Any]) -> str:
        if format.get("style", "json") != "json":
            raise Unsupported(
                f"'{self._param}' has a schema in the style {str(format['style'])[:60]!r}; "
                "supported is json.",
                param=self._param,
            )
        return self._build.schema(enforceable(format.get("json_schema"), self._param))

    def _any_text(self, format: Mapping[str, Any]) -> str:
        if format.get("excludes"):
            raise Unsupported(f"'{self._param}' has 'excludes'.", param=self._param)
        return pattern(_ANYTHING)

    def _sequence(self, elements: Sequence[Any]) -> str:
        """One after the other; free text ends where what follows it begins."""
        parts = []
        at = 0
        while at < len(elements):
            element = elements[at]
            follower = elements[at + 1] if at + 1 < len(elements) else None
            opening = self._opening(follower)
            if _is_any_text(element) and opening:
                self._any_text(element)
                parts.append(self._build.until(self._name(), opening))
                parts.append(self._rest(follower, opening))
                at += 2
            else:
                parts.append(self.write(element))
                at += 1
        return " ".join(parts)

    def _opening(self, format: Any) -> str:
        """The text with which a format always begins, where it does with one."""
        match format:
            case {"type": "const_string", "value": str(value)}:
                return value
            case {"type": "tag", "begin": str(begin)}:
                return begin
        return ""

    def _rest(self, format: Any, opening: str) -> str:
        """What follows the text with which a format begins."""
        if format["type"] == "const_string":
            return self._rule("")
        return self._rule(self._inside(format))

    def _tag(self, format: Mapping[str, Any]) -> str:
        return f"{self._literal(format, 'begin')} {self._inside(format)}"

    def _inside(self, format: Mapping[str, Any]) -> str:
        """A tag's content, and its end."""
        end = format.get("end")
        given = end if isinstance(end, list) else [end]
        ends = [e for e in given if isinstance(e, str)]
        if not ends or len(ends) < len(given):
            raise BadRequest(f"'{self._param}' has a tag without an 'end'.", param=self._param)
        content: Any = format.get("content")
        if _is_any_text(content) and any(ends):
            self._any_text(content)
            found = [self._build.until(self._name(), e) for e in ends if e]
            return f"({self._either(found)})"
        closing = self._either(self._build.literal(e) for e in ends)
        return f"{self.write(content)} ({closing})"

    def _triggered(self, format: Mapping[str, Any]) -> str:
        """Free text in which a trigger opens a tag that begins with it."""
        triggers = self._list(format, "triggers")
        units = []
        tags = self._list(format, "tags")
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise BadRequest(f"'{self._param}' has an empty trigger.", param=self._param)
            bodies = [
                f"{self._build.literal(self._text(t, 'begin')[len(trigger) :])} {self._inside(t)}"
                for t in tags
                if isinstance(t, Mapping) and self._text(t, "begin").startswith(trigger)
            ]
            if bodies:
                free = self._build.until(self._name(), trigger)
                units.append(f"{free} ({self._either(bodies)})")
        if not units:
            raise BadRequest(f"'{self._param}' has no tag for its triggers.", param=self._param)
        unit = self._rule(self._either(units))
        tail = self._rule(pattern(_ANYTHING))
        if format.get("stop_after_first"):
            return unit if format.get("at_least_one") else f"{unit} | {tail}"
        return f"{unit}{'+' if format.get('at_least_one') else '*'} {tail}"

    def _separated(self, format: Mapping[str, Any]) -> str:
        one = self._rule(self._either(self.write(t) for t in self._list(format, "tags")))
        separator = self._literal(format, "separator")
        several = one if format.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if format.get("at_least_one") else f"({several})?"


def _is_any_text(format: Any) -> bool:
    return isinstance(format, Mapping) and format.get("type") == "any_text"
