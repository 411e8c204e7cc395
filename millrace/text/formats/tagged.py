"""Calls written as tags, one per parameter, with values made into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.text.formats.coerce import coerce, is_text, kinds, properties, resolve
from millrace.text.formats.decoding import Decoding
from millrace.text.formats.reader import Malformed, Steps, Write, discard
from millrace.text.formats.syntax import TaggedCalls
from millrace.text.formats.values import escape

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_WRAPPERS = ("arguments", "input", "parameters", "properties")
"""Names under which some models put all arguments at once."""


def decode_tagged(state: Decoding, syntax: TaggedCalls) -> Steps[None]:
    reader = state.reader
    inner = (syntax.param_open, *syntax.closes)
    ends = (*syntax.header_end, *inner) if syntax.header_optional else syntax.header_end
    header, marker = yield from state.header(state.borders(ends))
    match = syntax.name_pattern.match(header)
    if marker not in ends or match is None:
        raise Malformed("no name")
    name = match.group("name")
    state.begin(name)
    state.write("{")
    schema = state.schema(name)
    borders = state.borders(inner)
    first = True
    if marker not in inner:
        marker = yield from reader.until(borders, discard)
    while marker == syntax.param_open:
        if syntax.nested:
            yield from _nested_parameter(state, syntax, schema, first)
        else:
            yield from _parameter(state, syntax, schema, first)
        first = False
        marker = yield from reader.until(borders, discard)
    if marker is None:
        raise Malformed("cut off")
    if marker not in syntax.closes:
        reader.unread(marker)
    state.write("}")
    state.end()


def _parameter(
    state: Decoding, syntax: TaggedCalls, schema: Mapping[str, Any], first: bool
) -> Steps[None]:
    reader = state.reader
    header, marker = yield from state.header(state.borders((syntax.param_end,)))
    match = syntax.param_pattern.match(header)
    if marker != syntax.param_end or match is None:
        raise Malformed("no parameter name")
    said = match.groupdict()
    if syntax.type_tags[0]:
        yield from state.blanks()
        if (yield from reader.skip(syntax.type_tags[0])):
            said["hint"], _ = yield from state.header(state.borders(syntax.type_tags[1:]))
    if syntax.value_open:
        yield from state.blanks()
        yield from reader.skip(syntax.value_open)
    key = match.group("name")
    lead = ("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
    kind = _declared(schema, key, said)
    if syntax.cdata and (yield from reader.skip(_CDATA)):
        ends = ValueEnds(
            (_CDATA_END,), (), syntax.value_closes, (syntax.param_open, *syntax.closes)
        )
    else:
        if syntax.trims:
            yield from reader.skip("\n")
        ends = _value_ends(state, syntax)
    if key in _WRAPPERS and not kind and properties(schema):
        parts: list[str] = []
        marker = yield from _text(state, ends, parts.append)
        lead = "" if first else ", "
        state.write(lead + _unwrapped("".join(parts), key, schema))
    else:
        marker = yield from _value(state, ends, lead, kind, schema)
    if marker == _CDATA_END:
        marker = yield from reader.until(state.borders(syntax.value_closes), discard)
        if marker is not None and marker not in syntax.value_closes:
            reader.unread(marker)


def _unwrapped(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """All arguments written as the object of one parameter that the tool does not have."""
    found = coerce(text, {"type": ["object", "string"]}, schema)
    value = json.loads(found)
    if isinstance(value, dict) and value and set(value) <= set(properties(schema)):
        return found.strip()[1:-1].strip()
    return json.dumps(key) + ": " + coerce(text, {}, schema)


@dataclass(frozen=True)
class ValueEnds:
    """What ends a value: its own marks, and, where those are missing, others."""

    closes: tuple[str, ...]
    stops: tuple[str, ...]
    """Marks of what comes next, which stay for it."""
    doubtful: tuple[str, ...]
    """Marks of something else that a text may hold: they end it only right before `after`."""
    after: tuple[str, ...]
    escaped: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.closes, *self.stops, *self.doubtful, *self.escaped)


def _value_ends(state: Decoding, syntax: TaggedCalls) -> ValueEnds:
    opens = tuple(mark for mark in state.anchors if mark not in syntax.closes)
    closes = syntax.value_closes
    stops = opens if syntax.nested else (syntax.param_open, *opens)
    if syntax.trims:
        closes = (*closes, *("\n" + close for close in closes))
    stops = (*stops, *("\n" + stop for stop in stops))
    doubtful = (*syntax.closes, *("\n" + close for close in syntax.closes))
    return ValueEnds(closes, stops, doubtful, state.anchors, syntax.escaped)


def _value(
    state: Decoding, ends: ValueEnds, lead: str, kind: Any, schema: Mapping[str, Any]
) -> Steps[str]:
    """A value up to its end, and the mark that ended it."""
    if is_text(kind, schema):
        state.write(lead + '"')
        marker = yield from _text(state, ends, lambda text: state.write(escape(text)))
        state.write('"')
    else:
        parts: list[str] = []
        marker = yield from _text(state, ends, parts.append)
        state.write(lead + coerce("".join(parts), kind, schema))
    return marker


def _text(state: Decoding, ends: ValueEnds, write: Write) -> Steps[str]:
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
            continue
        if marker not in ends.doubtful or (yield from _ends_here(state, ends.after)):
            reader.unread(marker)
            return marker
        write(marker)


def _ends_here(state: Decoding, after: tuple[str, ...]) -> Steps[bool]:
    reader = state.reader
    here = reader.hold()
    yield from state.blanks()
    found = (yield from reader.sees_any(state.patterns(after))) or reader.exhausted
    reader.back(here)
    reader.release(here)
    return found


_KINDS = {
    "string": "string", "str": "string", "integer": "integer", "int": "integer",
    "number": "number", "float": "number", "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "object": "object", "dict": "object", "null": "null",
}  # fmt: skip


def _declared(
    schema: Mapping[str, Any], key: str, said: Mapping[str, str | None]
) -> Mapping[str, Any]:
    """The parameter's schema; where the tag itself says the type, that wins.

    A tag that only hints at it counts where the schema says nothing.
    """
    if said.get("string") == "true" or said.get("type") == "string":
        return {"type": "string"}
    found = properties(schema).get(key)
    if said.get("hint") and not kinds(found, schema):
        kind = _KINDS.get(str(said["hint"]).partition("[")[0].strip().lower())
        return {"type": kind} if kind else {}
    if said.get("string") == "false" and is_text(found, schema):
        return {}
    return found if isinstance(found, Mapping) else {}


def _nested_parameter(
    state: Decoding, syntax: TaggedCalls, schema: Mapping[str, Any], first: bool
) -> Steps[None]:
    """`token<key>…token</key>`, where objects and lists are elements again."""
    key, marker = yield from state.header(state.borders((">",)))
    if marker != ">" or not re.match(r"[\w.\-]+\Z", key):
        raise Malformed("no parameter name")
    lead = ("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
    kind = _declared(schema, key, {})
    ends = replace(_value_ends(state, syntax), closes=(f"{syntax.nested}</{key}>",))
    if is_text(kind, schema):
        yield from _value(state, ends, lead, kind, schema)
        return
    parts: list[str] = []
    yield from _text(state, ends, parts.append)
    state.write(lead + _element("".join(parts), syntax.nested, kind, schema))


def _element(text: str, token: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    allowed = kinds(schema, root)
    parts = _children(text, token) if depth <= 64 else []
    if not parts:
        empty = not text.strip() and "string" not in allowed
        if empty and "object" in allowed:
            return "{}"
        if empty and "array" in allowed:
            return "[]"
        return coerce(text, schema, root)
    own = resolve(schema, root)
    if "array" in allowed or ("object" not in allowed and all(key == "item" for key, _ in parts)):
        items = [_element(body, token, own.get("items"), root, depth + 1) for _, body in parts]
        return "[" + ", ".join(items) + "]"
    fields = own.get("properties")
    known = fields if isinstance(fields, Mapping) else {}
    entries = [
        json.dumps(key, ensure_ascii=False)
        + ": "
        + _element(body, token, known.get(key, own.get("additionalProperties")), root, depth + 1)
        for key, body in parts
    ]
    return "{" + ", ".join(entries) + "}"


def _children(text: str, token: str) -> list[tuple[str, str]]:
    """The outermost elements of `text`, each with what is inside it."""
    found: list[tuple[str, str]] = []
    depth = begin = 0
    for tag in re.finditer(re.escape(token) + r"<(/?)([\w.\-]+)>", text):
        depth += -1 if tag.group(1) else 1
        if depth == 1 and not tag.group(1):
            begin = tag.end()
        elif depth == 0 and tag.group(1):
            found.append((tag.group(2), text[begin : tag.start()]))
    return found
