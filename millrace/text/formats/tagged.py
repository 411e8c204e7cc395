"""Calls written as tags, one per parameter, with values made into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.coerce import (
    coerce,
    is_text,
    kinds,
    may_wrap,
    properties,
    resolve,
    unquoted,
    unwrapped,
)
from millrace.text.formats.decoding import QUOTES, Decoding
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
from millrace.text.stops import Patterns


def decode_tagged(state: Decoding, syntax: TaggedCalls) -> Steps[None]:
    reader = state.reader
    inner = (*syntax.param_opens, *syntax.closes)
    ends = (*syntax.header_end, *inner) if syntax.header_optional else syntax.header_end
    yield from state.blanks()
    header, marker = yield from state.header(state.borders(ends))
    match = syntax.name_pattern.match(header)
    if marker not in ends or match is None:
        raise Malformed("no name")
    name = match.group("name")
    state.begin(name)
    if match.groupdict().get("closed"):
        state.write("{}")
        state.end()
        return
    borders = state.borders(inner)
    if marker not in inner and (yield from _is_object(state)):
        yield from state.blanks()
        yield from state.arguments(name)
        marker = syntax.param_opens[0]
        while marker in syntax.param_opens:
            marker = yield from reader.until(borders, discard)
    else:
        marker = yield from _parameters(state, syntax, state.schema(name), marker, borders)
    if marker is None:
        raise Malformed("cut off")
    if marker not in syntax.closes:
        reader.unread(marker)
    state.end()


def _is_object(state: Decoding) -> Steps[bool]:
    """Whether the arguments are written as one JSON object instead of tags."""
    reader = state.reader
    here = reader.hold()
    yield from state.blanks()
    found = yield from reader.skip("{")
    if found:
        yield from state.blanks()
        found = (yield from reader.peek()) in (*QUOTES, "}")
    reader.back(here)
    reader.release(here)
    return found


def _parameters(
    state: Decoding,
    syntax: TaggedCalls,
    schema: Mapping[str, Any],
    marker: str | None,
    borders: Patterns,
) -> Steps[str | None]:
    """The parameters of a call, whose header ended with `marker`; returns the mark after them."""
    state.write("{")
    first = True
    if marker not in (*syntax.param_opens, *syntax.closes):
        marker = yield from state.reader.until(borders, discard)
    while marker in syntax.param_opens:
        if syntax.nested:
            yield from _nested_parameter(state, syntax, schema, first)
        else:
            yield from _parameter(state, syntax, schema, first)
        first = False
        marker = yield from state.reader.until(borders, discard)
    if marker is not None:
        state.write("}")
    return marker


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
    if said.get("closed"):
        state.write(lead + coerce("", kind, schema))
        return
    if syntax.cdata and (yield from reader.skip(CDATA)):
        ends = cdata_ends(syntax)
    else:
        if syntax.trims:
            yield from reader.skip("\n")
        ends = value_ends(state, syntax, schema)
    if may_wrap(key, schema):
        parts: list[str] = []
        marker = yield from copy_text(state, ends, parts.append)
        text = "".join(parts)
        members = unwrapped(text, schema)
        state.write(
            ("" if first else ", ") + members if members else lead + coerce(text, kind, schema)
        )
    else:
        as_json = said.get("string") == "false"
        marker = yield from _value(state, ends, lead, kind, schema, as_json)
    if marker == CDATA_END:
        marker = yield from reader.until(state.borders(syntax.value_closes), discard)
        if marker is not None and marker not in syntax.value_closes:
            reader.unread(marker)


def _value(
    state: Decoding,
    ends: ValueEnds,
    lead: str,
    kind: Any,
    schema: Mapping[str, Any],
    as_json: bool = False,
) -> Steps[str]:
    """A value up to its end, and the mark that ended it. `as_json`: strings are in quotes."""
    if is_text(kind, schema) and not as_json:
        state.write(lead + '"')
        marker = yield from copy_text(state, ends, lambda text: state.write(escape(text)))
        state.write('"')
    else:
        parts: list[str] = []
        marker = yield from copy_text(state, ends, parts.append)
        text = "".join(parts)
        if as_json and kinds(kind, schema) == {"string"}:
            text = unquoted(text)
        state.write(lead + coerce(text, kind, schema))
    return marker


def _declared(
    schema: Mapping[str, Any], key: str, said: Mapping[str, str | None]
) -> Mapping[str, Any]:
    """The parameter's schema; the type that the tag names counts where the schema allows it."""
    found = properties(schema).get(key)
    allowed = kinds(found, schema)
    if said.get("string") == "true" or said.get("type") == "string":
        if not allowed or (allowed != {"string"} and "string" in allowed):
            return {"type": "string"}
    elif said.get("hint") and not allowed:
        return {"type": said["hint"]}
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
