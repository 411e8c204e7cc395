"""Calls written out as a family writes them: for templates that cannot, for examples, for tests.

The inverse of the decoders: what is written here reads back as the same calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.text.formats.syntax import (
    CallSyntax,
    HeaderCalls,
    JsonCalls,
    Messages,
    OutputFormat,
    PythonCalls,
    TaggedCalls,
)
from millrace.text.formats.values import ValueDialect


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]
    id: str = "0"


def write_calls(format: OutputFormat, calls: Sequence[Call]) -> str:
    """The text of an answer's calls in this family's markup."""
    if format.messages is not None:
        return _messages(format, format.messages, calls)
    return write_syntax(written_syntax(format), calls)


def written_syntax(format: OutputFormat) -> CallSyntax:
    """The syntax the family itself writes, of those it is read with."""
    return format.calls[format.written]


def write_syntax(syntax: CallSyntax, calls: Sequence[Call]) -> str:
    if isinstance(syntax, JsonCalls):
        return _json(syntax, calls)
    if isinstance(syntax, HeaderCalls):
        start, end = syntax.section or ("", "")
        return start + syntax.between.join(_header(syntax, i, c) for i, c in enumerate(calls)) + end
    if isinstance(syntax, TaggedCalls):
        start, end = syntax.wrap
        return start + syntax.between.join(_tagged(syntax, i, c) for i, c in enumerate(calls)) + end
    return _python(syntax, calls)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(syntax: JsonCalls, calls: Sequence[Call]) -> str:
    bodies = []
    for index, call in enumerate(calls):
        if syntax.name_is_key:
            bodies.append(to_json({call.name: call.arguments}))
            continue
        entry: dict[str, Any] = {}
        if syntax.write_id == "before":
            entry[syntax.id_keys[-1]] = str(index)
        entry[syntax.name_keys[0]] = call.name
        entry[syntax.args_keys[0]] = call.arguments
        if syntax.write_id == "after":
            entry[syntax.id_keys[0]] = call.id
        bodies.append(to_json(entry))
    lead = syntax.opens[0] if syntax.opens else ""
    if not syntax.opens and syntax.soft and not syntax.soft_inside:
        lead = syntax.soft[0]
    if syntax.soft_inside and syntax.soft:
        lead = ""
    close = (syntax.closes or (syntax.fence,))[0]
    pad = syntax.padding
    if syntax.layout == "each":
        return syntax.between.join(lead + pad + body + pad + close for body in bodies)
    if syntax.layout == "lines":
        return lead + pad + "\n".join(bodies) + pad + close
    return f"{lead}[{pad}{syntax.between.join(bodies)}{pad}]{close}"


def _header(syntax: HeaderCalls, index: int, call: Call) -> str:
    return (
        syntax.template.replace("{name}", call.name)
        .replace("{id}", call.id)
        .replace("{index}", str(index))
        .replace("{arguments}", _value(call.arguments, syntax.dialect))
    )


def _value(value: Any, dialect: ValueDialect) -> str:
    quote = dialect.delimiter
    if quote is None:
        return to_json(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(item, dialect)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_value(item, dialect) for item in value) + "]"
    return quote + value + quote if isinstance(value, str) else to_json(value)


def _tagged(syntax: TaggedCalls, index: int, call: Call) -> str:
    parts = [syntax.call_open.replace("{name}", call.name).replace("{index}", str(index + 1))]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else to_json(value)
        if syntax.nested:
            text = _elements(value, syntax.nested)
        elif syntax.cdata and isinstance(value, str) and set(text) & set("<&\n"):
            text = f"<![CDATA[{text}]]>"
        elif isinstance(value, str) and not syntax.cdata:
            for spelling, meaning in syntax.escaped.items():
                text = text.replace(meaning, spelling)
        parts.append(
            syntax.param_write.replace("{key}", key)
            .replace("{string}", "true" if isinstance(value, str) else "false")
            .replace("{type}", json_type(value))
            .replace("{value}", text)
        )
    return "".join([*parts, syntax.call_close])


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "string")


def _elements(value: Any, token: str) -> str:
    if isinstance(value, Mapping):
        return "".join(
            f"{token}<{key}>{_elements(item, token)}{token}</{key}>" for key, item in value.items()
        )
    if isinstance(value, list):
        return "".join(f"{token}<item>{_elements(item, token)}{token}</item>" for item in value)
    return value if isinstance(value, str) else to_json(value)


def _python(syntax: PythonCalls, calls: Sequence[Call]) -> str:
    bodies = [
        call.name + "(" + ", ".join(f"{k}={v!r}" for k, v in call.arguments.items()) + ")"
        for call in calls
    ]
    if syntax.soft:
        return syntax.soft[0] + "\n" + "\n".join(bodies) + "\n" + syntax.fence
    start = syntax.opens[0] if syntax.opens else ""
    end = syntax.closes[0] if syntax.closes else ""
    return f"{start}[{', '.join(bodies)}]{end}"


def _messages(format: OutputFormat, syntax: Messages, calls: Sequence[Call]) -> str:
    parts = []
    for call in calls:
        if syntax.inline_bodies:
            body = write_syntax(written_syntax(format), [call])
            parts.append(f" to={call.name}{syntax.message}{body}{syntax.ends[0]}")
        else:
            channel, constrain = syntax.header
            parts.append(
                f"{channel}commentary to={syntax.recipient_prefix}{call.name} {constrain}json"
                f"{syntax.message}{to_json(call.arguments)}{syntax.ends[-1]}"
            )
    return (syntax.start + "assistant").join(parts)
