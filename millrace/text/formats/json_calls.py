"""Calls written as JSON objects, and calls whose header is followed by JSON arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from millrace.text.formats.coerce import as_object, properties
from millrace.text.formats.decoding import PARAGRAPH, QUOTES, Decoding, plain_name, spelling
from millrace.text.formats.reader import Malformed, Steps, discard
from millrace.text.formats.syntax import Field, HeaderCalls, JsonCalls
from millrace.text.formats.values import JSON, copy_value
from millrace.text.stops import Patterns

_SEPARATOR = re.compile(r"[\s,;]+")


def decode_json(state: Decoding, syntax: JsonCalls) -> Steps[None]:
    """Objects one after another, in a list or not, as far as they go."""
    reader = state.reader
    yield from state.blanks()
    wrapped = yield from _skip_wrapper(state)
    listed = yield from reader.skip("[")
    yield from state.blanks()
    if listed and (yield from state.empty_list()):
        return
    yield from _recoverable(state, syntax)
    while True:
        here = reader.hold()
        yield from reader.run(_SEPARATOR, discard)
        more = (yield from reader.peek()) == "{"
        reader.release(here)
        if not more:
            closed = listed and (yield from reader.skip("]"))
            if not closed:
                state.undo(here)
            break
        if listed or syntax.fence:
            state.settle()
        if not (yield from state.another(_recoverable(state, syntax), here)):
            return
    if wrapped:
        yield from state.closing("}")
    yield from state.surplus(syntax.fence, listed and not closed)
    if syntax.fence:
        yield from state.closing(syntax.fence)


def _skip_wrapper(state: Decoding) -> Steps[bool]:
    """Skips the beginning of an object that holds nothing but a list of calls."""
    reader = state.reader
    here = reader.hold()
    found = True
    for text in ("{", '"tool_calls"', ":", "["):
        yield from state.blanks()
        found = found and (yield from reader.skip(text))
    reader.release(here)
    if found:
        reader.unread("[")
    else:
        reader.back(here)
    return found


def _recoverable(state: Decoding, syntax: JsonCalls) -> Steps[None]:
    """One object; where it is broken once its call has begun, the next good one behind the fault."""
    try:
        yield from _object(state, syntax)
        return
    except Malformed:
        if not state.recovers or not state.committed or state.reader.truncated:
            raise
    state.cut()
    openings = json_openings(syntax, state.sink.tools)
    soft, ends = state.soft, (syntax.fence,) if syntax.fence else ()
    if not syntax.closes and not syntax.fence:
        ends = (PARAGRAPH,)
    while (yield from state.recover((*openings, *ends))) in openings:
        here = state.reader.at
        state.soft = True
        try:
            yield from _object(state, syntax)
            return
        except Malformed:
            if state.reader.truncated:
                raise
            if state.committed:
                state.cut()
            else:
                state.begun_at = here + 1
                state.reader.back(state.begun_at)
        finally:
            state.soft = soft


def json_openings(syntax: JsonCalls, tools: Iterable[str]) -> tuple[str, ...]:
    """How a call's object begins, for a search in text that is broken."""
    keys = [*syntax.name_keys, *syntax.id_keys, "function", "type"]
    if syntax.name_is_key:
        keys = list(tools)
    blanks = ("", " ", "\n", "\n  ", "\n    ")
    return tuple(f'{{{blank}"{key}"' for key in dict.fromkeys(keys) for blank in blanks)


def _object(state: Decoding, syntax: JsonCalls) -> Steps[None]:
    reader = state.reader
    if (yield from reader.take()) != "{":
        raise Malformed("not an object")
    name: str | None = None
    given: str | None = None
    early: list[str] | None = None
    wrapped = False
    known = (*syntax.name_keys, *syntax.args_keys, *syntax.id_keys, "type", "function")
    while True:
        yield from reader.run(_SEPARATOR, discard)
        if (yield from reader.skip("}")):
            if not wrapped:
                break
            wrapped = False
            continue
        if state.committed and (yield from reader.peek()) in ("{", "]"):
            break
        key = yield from state.text()
        if state.soft and not syntax.name_is_key and key not in known:
            raise Malformed(key)
        yield from state.blanks()
        if (yield from reader.take()) != ":":
            raise Malformed("a key without a value")
        yield from state.blanks()
        if syntax.name_is_key and name is None:
            name = key
            yield from _arguments(state, syntax, name, given)
        elif key == "function" and not wrapped and (yield from reader.skip("{")):
            wrapped = True
        elif name is None and (key in syntax.name_keys or key == "function"):
            name = yield from state.name()
            if early is not None:
                _begin(state, syntax, name, given)
                state.write(as_object("".join(early), state.schema(name)))
        elif key in syntax.args_keys and not state.committed and early is None:
            if name is not None:
                yield from _arguments(state, syntax, name, given)
            else:
                yield from state.check_arguments()
                early = []
                yield from copy_value(reader, (yield from spelling(reader)), early.append)
        elif key in syntax.id_keys and syntax.keep_ids and (yield from reader.peek()) in QUOTES:
            given = yield from state.text()
        else:
            yield from copy_value(reader, (yield from spelling(reader)), discard)
    if not state.committed:
        if name is None or state.soft:
            raise Malformed("no call")
        _begin(state, syntax, name, given)
        state.write("{}")
    state.end()


def _arguments(state: Decoding, syntax: JsonCalls, name: str, given: str | None) -> Steps[None]:
    yield from state.check_arguments()
    _begin(state, syntax, name, given)
    yield from state.arguments(name)


def _begin(state: Decoding, syntax: JsonCalls, name: str, given: str | None) -> None:
    if name in syntax.ignored and name not in state.sink.tools:
        state.swallow()
    else:
        state.begin(name, given)


def decode_header(state: Decoding, syntax: HeaderCalls) -> Steps[None]:
    """Fields separated by markers, then the arguments."""
    reader = state.reader
    borders = state.borders((*syntax.fields, "{"))
    values: dict[Field, str] = {}
    field = syntax.first
    while field != "arguments":
        text, marker = yield from state.header(borders)
        values[field] = text.strip()
        if values.get("name") == syntax.content_name is not None:
            return
        offered = plain_name(text.strip(), state.sink.tools) in state.sink.tools
        if marker is None and field == "name" and offered and not reader.truncated:
            # A name and nothing else is a call without arguments.
            break
        if marker is None or "\n" in values[field]:
            raise Malformed("cut off")
        if marker not in syntax.fields:
            reader.unread(marker)
            break
        field = syntax.fields[marker]
    match = syntax.name_pattern.match(values.get("name", ""))
    if match is None:
        raise Malformed("no name")
    name = match.group("name")
    given = values.get("name") if syntax.id_is_header else values.get("id")
    yield from state.blanks()
    if (yield from reader.skip("```json")):
        yield from state.blanks()
    if syntax.id_is_header and name.isdigit() and name not in state.sink.tools:
        name = yield from _name_by_arguments(state, name)
    empty = yield from reader.sees_any(Patterns([*syntax.closes, "```"]))
    if empty or (reader.exhausted and not reader.truncated):
        state.begin(name, given)
        state.write("{}")
    else:
        yield from state.check_arguments()
        state.begin(name, given if syntax.keep_ids else None)
        yield from state.arguments(name, syntax.dialect)
    state.end()
    yield from state.surplus("```")
    if syntax.closes:
        yield from state.closing("```", syntax.closes[0])
    elif syntax.fence:
        yield from state.closing(syntax.fence)


def _name_by_arguments(state: Decoding, number: str) -> Steps[str]:
    """The tool meant by a call that has only a number: the one that its arguments fit."""
    tools = state.sink.tools
    if len(tools) == 1:
        return next(iter(tools))
    reader = state.reader
    here = reader.hold()
    parts: list[str] = []
    try:
        yield from copy_value(reader, JSON, parts.append)
        keys = set(json.loads("".join(parts)))
    except (Malformed, TypeError, ValueError):
        keys = set()
    reader.back(here)
    reader.release(here)
    fitting = [
        name
        for name, tool in tools.items()
        if keys and keys <= set(properties(tool.parameters)) and keys >= set(tool.required)
    ]
    return fitting[0] if len(fitting) == 1 else number
