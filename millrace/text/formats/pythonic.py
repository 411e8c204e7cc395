"""Calls written as Python function calls, keyword or positional, and shell-like ones.

Positional arguments take the schema's property names in order; values are JSON made from Python
literals and brought to the schema's types.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.coerce import coerce, coerce_json, is_text, resolve
from millrace.text.formats.decoding import Decoding
from millrace.text.formats.reader import Malformed, Steps, discard
from millrace.text.formats.syntax import PythonCalls
from millrace.text.formats.values import PYTHON, copy_value
from millrace.text.stops import Patterns

_SEPARATOR = re.compile(r"[\s,;]+")
_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")


def decode_python(state: Decoding, syntax: PythonCalls) -> Steps[None]:
    reader = state.reader
    yield from state.blanks()
    listed = syntax.brackets and (yield from reader.skip("["))
    if syntax.bare and not listed:
        raise Malformed("no list")
    yield from state.blanks()
    yield from _call(state, syntax)
    while True:
        here = reader.hold()
        yield from reader.run(_SEPARATOR, discard)
        char = yield from reader.peek()
        reader.release(here)
        if listed and char == "]":
            reader.at += 1
            break
        if not (char.isalpha() or char == "_"):
            state.undo(here)
            break
        retry = reader.hold()
        try:
            yield from _call(state, syntax)
        except Malformed:
            reader.release(retry)
            if state.committed or reader.truncated:
                raise
            reader.back(here)
            return
        reader.release(retry)
    if syntax.fence:
        yield from state.closing(syntax.fence)


def _call(state: Decoding, syntax: PythonCalls) -> Steps[None]:
    reader = state.reader
    name = yield from reader.word(_NAME)
    if not name:
        raise Malformed("no name")
    if syntax.shell and name == "print" and (yield from reader.skip("(")):
        yield from state.blanks()
        yield from _call(state, syntax)
        yield from state.blanks()
        yield from reader.skip(")")
        return
    name = _plain(name, state)
    here = reader.hold()
    yield from state.blanks()
    opened = yield from reader.skip("(")
    reader.release(here)
    if opened:
        state.begin(name)
        yield from _arguments(state, state.schema(name))
    elif syntax.shell and name in state.sink.tools:
        reader.back(here)
        yield from _shell(state, syntax, name)
    else:
        raise Malformed("no call")
    state.end()


def _plain(name: str, state: Decoding) -> str:
    """The tool meant by a dotted name: `default_api.name` and `name.call` are ways to say it."""
    if name in state.sink.tools:
        return name
    for part in (name.removesuffix(".call"), name.rpartition(".")[2]):
        if part in state.sink.tools:
            return part
    return name


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = resolve(schema, schema).get("properties")
    return found if isinstance(found, Mapping) else {}


def _arguments(state: Decoding, schema: Mapping[str, Any]) -> Steps[None]:
    reader = state.reader
    properties = _properties(schema)
    order = list(properties)
    state.write("{")
    count = 0
    while True:
        yield from reader.run(_SEPARATOR, discard)
        if (yield from reader.skip(")")):
            break
        key = yield from _keyword(state)
        if key is None:
            if count >= len(order):
                state.complete("}")
                raise Malformed("too many arguments")
            key = order[count]
        lead = (", " if count else "") + json.dumps(key, ensure_ascii=False) + ": "
        yield from _value(state, lead, properties.get(key), schema)
        count += 1
    state.write("}")


def _keyword(state: Decoding) -> Steps[str | None]:
    reader = state.reader
    here = reader.hold()
    key = yield from reader.word(_KEY)
    yield from state.blanks()
    named = bool(key) and (yield from reader.skip("="))
    reader.release(here)
    if named:
        yield from state.blanks()
        return key
    reader.back(here)
    return None


def _value(state: Decoding, lead: str, kind: Any, schema: Mapping[str, Any]) -> Steps[None]:
    reader = state.reader
    quoted = (yield from reader.peek()) in ('"', "'")
    if quoted and is_text(kind, schema):
        state.write(lead)
        yield from copy_value(
            reader, PYTHON, state.write, lambda closing: state.complete(closing + "}")
        )
        return
    parts: list[str] = []
    yield from copy_value(reader, PYTHON, parts.append, lambda _: state.complete("}"))
    state.write(lead + coerce_json("".join(parts), kind, schema))


def _shell(state: Decoding, syntax: PythonCalls, name: str) -> Steps[None]:
    ends = ["\n", *([syntax.fence] if syntax.fence else [])]
    line, marker = yield from state.reader.collect(Patterns(ends))
    if marker is not None:
        state.reader.at -= len(marker)
    elif state.reader.truncated:
        raise Malformed("cut off")
    schema = state.schema(name)
    properties = _properties(schema)
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    if len(properties) == 1 and len(words) > 1 and "=" not in words[0]:
        words = [line.strip()]
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.removeprefix("--")
        if not (equals and key in properties):
            free = [name for name in properties if name not in values]
            if not free:
                raise Malformed("too many arguments")
            key, value = free[0], word
        values[key] = coerce(value, properties.get(key), schema)
    state.begin(name)
    entries = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in values.items())
    state.write("{" + ", ".join(entries) + "}")
