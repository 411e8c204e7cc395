"""What a request demands of its answer's form, as plain data: to be checked where there is time.

Which field asks, and for what, is settled at once; compiling a schema or a grammar to see whether it
can be enforced is `entry`'s work, and not for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millrace.errors import BadRequest
from millrace.text.grammar.lark import Entry
from millrace.text.grammar.outputs import from_choice, from_grammar, from_regex, from_schema

Kind = Literal["schema", "regex", "choice", "grammar"]
_BUILDERS = {
    "schema": from_schema,
    "regex": from_regex,
    "choice": from_choice,
    "grammar": from_grammar,
}
_FIELDS: dict[str, Kind] = {
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_FORMATS: dict[str, Kind] = {
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "gbnf": "grammar",
}


class Demand(msgspec.Struct, frozen=True):
    kind: Kind
    value: Any
    param: str
    """The request's field that asks for it."""

    def entry(self) -> Entry:
        """As a grammar, or a BadRequest that says why it cannot be enforced."""
        return _BUILDERS[self.kind](self.value, self.param)


def any_object(param: str = "response_format") -> Demand:
    return Demand("schema", {"type": "object"}, param)


def demand_of_format(value: Any) -> Demand | None:
    """OpenAI's response_format, in its chat and its Responses spelling; None for plain text."""
    param = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadRequest(f"'{param}' must be an object with a type.", param=param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return any_object() if schema is None else Demand("schema", schema, param)
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None:
            raise BadRequest(f"'{param}.json_schema' has no schema.", param=f"{param}.json_schema")
        return Demand("schema", schema, f"{param}.json_schema")
    if isinstance(kind, str) and kind in _FORMATS:
        text = value.get("pattern") or value.get("grammar") or value.get("value")
        return Demand(_FORMATS[kind], text, param)
    raise BadRequest(
        f"'{param}.type' is {kind!r}; it must be text, json_object or json_schema.", param=param
    )


def demand_of(fields: Mapping[str, Any]) -> Demand | None:
    """The one demand among a request's fields; two of them would contradict each other."""
    found = [name for name in _FIELDS if fields.get(name) is not None]
    if fields.get("response_format") is not None:
        asked = demand_of_format(fields["response_format"])
        if asked is not None and not found:
            return asked
        found += ["response_format"] if asked is not None else []
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in sorted(found))
        raise BadRequest(f"Give only one of {names}.", param=found[0])
    return Demand(_FIELDS[found[0]], fields[found[0]], found[0]) if found else None
