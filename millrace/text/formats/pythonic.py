"""Calls written as Python function calls, keyword or positional, and shell-like ones.

Positional arguments take the names of the tool's parameters in the order in which tools are shown,
the required ones first; values are JSON made from Python literals and brought to the schema's types.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.text.formats.arguments import ArgumentText
from millrace.text.formats.coerce import (
    coerce,
    coerce_json,
    is_text,
    may_wrap,
    parameter_order,
    properties,
    unwrapped,
)
from millrace.text.formats.decoding import PARAGRAPH, QUOTES, Decoding
from millrace.text.formats.reader import Malformed, Steps, Write, discard
from millrace.text.formats.syntax import PythonCalls
from millrace.text.formats.values import PYTHON, copy_value
from millrace.text.stops import Patterns

_SEPARATOR = re.compile(r"[\s,;]+")
_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"[^,()\[\]{}<`]+")
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def decode_python(state: Decoding, syntax: PythonCalls) -> Steps[None]:
    reader = state.reader
    yield from state.blanks()
    listed = syntax.brackets and (yield from reader.skip("["))
    yield from state.blanks()
    if listed and (yield from state.empty_list()):
        return
    yield from _recoverable(state, syntax)
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
        if listed or syntax.fence:
            state.settle()
        if not (yield from state.another(_recoverable(state, syntax), here)):
            return
    yield from state.surplus(syntax.fence)
    if syntax.fence:
        yield from state.closing(syntax.fence)


def _recoverable(state: Decoding, syntax: PythonCalls) -> Steps[None]:
    """One call; where it is broken once it has begun, the next good one behind the fault."""
    try:
        yield from _call(state, syntax)
        return
    except Malformed:
        if not state.recovers or not state.committed or state.reader.truncated:
            raise
    state.cut()
    openings = python_openings(state.sink.tools)
    fence = (syntax.fence,) if syntax.fence else () if syntax.closes else (PARAGRAPH,)
    while (yield from state.recover((*openings, *fence))) in openings:
        try:
            yield from _call(state, syntax)
            return
        except Malformed:
            if state.reader.truncated:
                raise
            state.cut()


def python_openings(tools: Iterable[str]) -> tuple[str, ...]:
    """How a call of an offered tool begins, for a search in text that is broken."""
    return tuple(f"{name}(" for name in tools)


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


def _arguments(state: Decoding, schema: Mapping[str, Any]) -> Steps[None]:
    reader = state.reader
    known = properties(schema)
    free = parameter_order(schema)
    surplus = (f"arg{number}" for number in itertools.count())
    lead = "{"
    while True:
        yield from reader.run(_SEPARATOR, discard)
        if (yield from reader.skip(")")):
            break
        if (yield from reader.skip("**")):
            yield from _wrapper(state, lead, "kwargs", schema, True)
            lead = ", "
            continue
        key = yield from _keyword(state)
        named = key is not None
        if key is None:
            key = free[0] if free else next(surplus)
        if key in free:
            free.remove(key)
        if may_wrap(key, schema):
            yield from _wrapper(state, lead, key, schema, named)
        else:
            quoted = json.dumps(key, ensure_ascii=False)
            yield from _value(state, f"{lead}{quoted}: ", known.get(key), schema, named)
        lead = ", "
    state.write("{}" if lead == "{" else "}")


def _wrapper(
    state: Decoding, lead: str, key: str, schema: Mapping[str, Any], named: bool
) -> Steps[None]:
    """A parameter that the tool does not have, but which may hold all arguments."""
    parts: list[str] = []
    yield from _read_value(state, parts.append, {}, schema, named)
    value = "".join(parts)
    state.write(lead + (unwrapped(value, schema) or f"{json.dumps(key)}: {value}"))


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


def _value(
    state: Decoding, lead: str, kind: Any, schema: Mapping[str, Any], named: bool
) -> Steps[None]:
    reader = state.reader
    char = yield from reader.peek()
    if char in QUOTES and is_text(kind, schema):
        state.write(lead)
        yield from copy_value(reader, PYTHON, state.write, state.suspect)
        if state.suspect() and not (yield from _at_border(state)):
            raise Malformed("a quote is missing")
        return
    yield from _read_value(state, lambda text: state.write(lead + text), kind, schema, named)


def _read_value(
    state: Decoding, write: Write, kind: Any, schema: Mapping[str, Any], named: bool
) -> Steps[None]:
    """Writes a value once it is whole."""
    reader = state.reader
    char = yield from reader.peek()
    here = reader.hold()
    parts: list[str] = []
    text = ArgumentText(parts.append, state.marks)
    try:
        yield from copy_value(reader, PYTHON, text, lambda: text.suspect)
        text.end()
        bare = char not in QUOTES and parts[0].startswith('"')
        whole = not bare and (yield from _at_border(state))
    except Malformed:
        if not state.may_return():
            raise
        whole = False
    if whole:
        write(coerce_json("".join(parts), kind, schema))
    else:
        reader.back(here)
        write(coerce((yield from _unquoted(state, named)), kind, schema))
    reader.release(here)


def _at_border(state: Decoding) -> Steps[bool]:
    """Whether an argument may end here: a comma, the end of the call, or the next keyword."""
    reader = state.reader
    here = reader.hold()
    yield from state.blanks()
    char = yield from reader.peek()
    found = char in (",", ")", ";") or (yield from _keyword(state)) is not None
    reader.back(here)
    reader.release(here)
    return found


def _unquoted(state: Decoding, named: bool) -> Steps[str]:
    """Text that stands for itself, up to the end of the call or the next argument.

    After a keyword only another keyword is one: `city=Paris, France, days=3` has two arguments.
    """
    reader = state.reader
    parts: list[str] = []
    depth = 0
    while True:
        yield from reader.run(_PLAIN, parts.append)
        char = yield from reader.peek()
        if not char or (yield from reader.sees_any(state.marks)):
            raise Malformed("cut off")
        if not depth and (
            char == ")" or (char == "," and (yield from _new_argument(state, named)))
        ):
            break
        depth = max(0, depth + _DEPTH.get(char, 0))
        parts.append((yield from reader.take()))
    text = "".join(parts).strip()
    if not text:
        raise Malformed("no value")
    return text


def _new_argument(state: Decoding, named: bool) -> Steps[bool]:
    if not named:
        return True
    reader = state.reader
    here = reader.hold()
    yield from reader.run(_SEPARATOR, discard)
    found = (yield from _keyword(state)) is not None or (yield from reader.peek()) == ")"
    reader.back(here)
    reader.release(here)
    return found


def _shell(state: Decoding, syntax: PythonCalls, name: str) -> Steps[None]:
    """`name rest of the line`: the rest is the first argument, unless it is `key=value` pairs."""
    ends = ["\n", *([syntax.fence] if syntax.fence else [])]
    line, marker = yield from state.reader.collect(Patterns(ends))
    if marker is not None:
        state.reader.unread(marker)
    elif state.reader.truncated:
        raise Malformed("cut off")
    schema = state.schema(name)
    known = properties(schema)
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    pairs = [word.removeprefix("--").partition("=") for word in words]
    if not all(equals and key in known for key, equals, _ in pairs):
        first = next(iter(parameter_order(schema)), "input")
        pairs = [(first, "=", words[0] if len(words) == 1 else line.strip())]
    state.begin(name)
    entries = {key: coerce(value, known.get(key), schema) for key, _, value in pairs}
    body = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in entries.items())
    state.write("{" + ", ".join(body) + "}")
