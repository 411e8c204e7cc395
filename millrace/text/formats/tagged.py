"""Calls written as tags, one per parameter, with values made into JSON by the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.coerce import coerce, is_text, kinds, resolve
from millrace.text.formats.decoding import Decoding
from millrace.text.formats.reader import Malformed, Steps, discard
from millrace.text.formats.syntax import TaggedCalls
from millrace.text.formats.values import escape
from millrace.text.stops import Patterns

_CDATA, _CDATA_END = "<![CDATA[", "]]>"


def decode_tagged(state: Decoding, syntax: TaggedCalls) -> Steps[None]:
    reader = state.reader
    inner = (syntax.param_open, *syntax.closes)
    ends = (*syntax.header_end, *inner) if syntax.header_optional else syntax.header_end
    header, marker = yield from reader.collect(Patterns(ends))
    match = syntax.name_pattern.match(header)
    if marker is None or match is None:
        raise Malformed("no name")
    name = match.group("name")
    state.begin(name)
    state.write("{")
    schema = state.schema(name)
    borders = Patterns(inner)
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
    state.write("}")
    state.end()


def _parameter(
    state: Decoding, syntax: TaggedCalls, schema: Mapping[str, Any], first: bool
) -> Steps[None]:
    reader = state.reader
    header, marker = yield from reader.collect(Patterns([syntax.param_end]))
    match = syntax.param_pattern.match(header)
    if marker is None or match is None:
        raise Malformed("no parameter name")
    if syntax.value_open:
        yield from state.blanks()
        yield from reader.skip(syntax.value_open)
    key = match.group("name")
    lead = ("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
    kind = _declared(schema, key, match.groupdict())
    closes = syntax.value_closes
    if syntax.cdata and (yield from reader.skip(_CDATA)):
        closes = (_CDATA_END,)
    elif syntax.trims:
        yield from reader.skip("\n")
        closes = (*closes, *("\n" + close for close in closes))
    if is_text(kind, schema):
        state.write(lead + '"')
        marker = yield from reader.until(Patterns(closes), lambda text: state.write(escape(text)))
        if marker is None:
            raise Malformed("cut off")
        state.write('"')
    else:
        text, marker = yield from reader.collect(Patterns(closes))
        if marker is None:
            raise Malformed("cut off")
        state.write(lead + coerce(text, kind, schema))
    if marker == _CDATA_END:
        yield from reader.until(Patterns(syntax.value_closes), discard)


def _declared(
    schema: Mapping[str, Any], key: str, said: Mapping[str, str | None]
) -> Mapping[str, Any]:
    """The parameter's schema; where the tag itself says the type, that wins."""
    if said.get("string") == "true" or said.get("type") == "string":
        return {"type": "string"}
    properties = resolve(schema, schema).get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if said.get("string") == "false" and is_text(found, schema):
        return {}
    return found if isinstance(found, Mapping) else {}


def _nested_parameter(
    state: Decoding, syntax: TaggedCalls, schema: Mapping[str, Any], first: bool
) -> Steps[None]:
    """`token<key>…token</key>`, where objects and lists are elements again."""
    reader = state.reader
    key, marker = yield from reader.collect(Patterns([">"]))
    if marker is None or not re.match(r"[\w.\-]+\Z", key):
        raise Malformed("no parameter name")
    lead = ("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
    kind = _declared(schema, key, {})
    close = f"{syntax.nested}</{key}>"
    if is_text(kind, schema):
        state.write(lead + '"')
        marker = yield from reader.until(Patterns([close]), lambda text: state.write(escape(text)))
        if marker is None:
            raise Malformed("cut off")
        state.write('"')
        return
    text, marker = yield from reader.collect(Patterns([close]))
    if marker is None:
        raise Malformed("cut off")
    state.write(lead + _element(text, syntax.nested, kind, schema))


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
