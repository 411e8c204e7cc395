"""Calls written as tags, one per parameter, with values made into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.coerce import coerce, is_text, kinds, properties, resolve
from millrace.text.formats.decoding import Decoding
from millrace.text.formats.reader import Malformed, Steps, discard
from millrace.text.formats.syntax import TaggedCalls
from millrace.text.formats.tag_values import (
    CDATA,
    CDATA_END,
    ValueEnds,
    cdata_ends,
    copy_text,
    value_ends,
)
from millrace.text.formats.values import escape

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
    if syntax.cdata and (yield from reader.skip(CDATA)):
        ends = cdata_ends(syntax)
    else:
        if syntax.trims:
            yield from reader.skip("\n")
        ends = value_ends(state, syntax, schema)
    if key in _WRAPPERS and not kind and properties(schema):
        parts: list[str] = []
        marker = yield from copy_text(state, ends, parts.append)
        lead = "" if first else ", "
        state.write(lead + _unwrapped("".join(parts), key, schema))
    else:
        marker = yield from _value(state, ends, lead, kind, schema)
    if marker == CDATA_END:
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


def _value(
    state: Decoding, ends: ValueEnds, lead: str, kind: Any, schema: Mapping[str, Any]
) -> Steps[str]:
    """A value up to its end, and the mark that ended it."""
    if is_text(kind, schema):
        state.write(lead + '"')
        marker = yield from copy_text(state, ends, lambda text: state.write(escape(text)))
        state.write('"')
    else:
        parts: list[str] = []
        marker = yield from copy_text(state, ends, parts.append)
        state.write(lead + coerce("".join(parts), kind, schema))
    return marker


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
    ends = value_ends(state, syntax, schema, close=f"{syntax.nested}</{key}>")
    if is_text(kind, schema):
        yield from _value(state, ends, lead, kind, schema)
        return
    parts: list[str] = []
    yield from copy_text(state, ends, parts.append)
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
