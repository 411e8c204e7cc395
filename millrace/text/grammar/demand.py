"""What a request demands of its answer's form, as plain data: to be checked where there is time.

Which field asks, and for what, is settled at once; compiling a schema or a grammar to see whether it
can be enforced is `entry`'s work, and not for the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from millrace.errors import BadRequest, Unsupported
from millrace.text.grammar.lark import Entry, single
from millrace.text.grammar.outputs import from_choice, from_grammar, from_regex, from_schema
from millrace.text.grammar.structural import structural_grammar

Kind = Literal["schema", "regex", "choice", "grammar", "structural"]
_BUILDERS = {
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


_STRUCTURED: dict[str, Kind] = {
    "json": "schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "schema",
}


class Demand(msgspec.Struct, frozen=True):
    kind: Kind
    value: Any
    param: str
    """The request's field that asks for it."""
    compact: bool = False
    """JSON without any blank between its tokens."""

    def entry(self) -> Entry:
        """As a grammar, or a BadRequest that says why it cannot be enforced."""
        if self.kind == "schema":
            return from_schema(self.value, self.param, compact=self.compact)
        if self.kind == "structural":
            raise Unsupported(f"'{self.param}' is for raw prompts alone.", param=self.param)
        return _BUILDERS[self.kind](self.value, self.param)

    def alone(self, tokens: Mapping[str, int]) -> str:
        """As the grammar of an answer that is nothing else; `tokens` are what no text spells."""
        if self.kind == "structural":
            return structural_grammar(self.value, tokens, self.param)
        return single(self.entry())


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
    found = {
        name: Demand(kind, fields[name], name)
        for name, kind in _FIELDS.items()
        if fields.get(name) is not None
    }
    if (asked := demand_of_format(fields.get("response_format"))) is not None:
        found["response_format"] = asked
    if (structured := fields.get("structured_outputs")) is not None:
        found["structured_outputs"] = _demand_of_structured(structured)
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in sorted(found))
        raise BadRequest(f"Give only one of {names}.", param=next(iter(found)))
    return next(iter(found.values()), None)


def _demand_of_structured(value: Mapping[str, Any]) -> Demand:
    """vLLM's structured_outputs, of whose kinds there is one."""
    kinds = [name for name in _STRUCTURED if value.get(name)]
    if len(kinds) != 1:
        raise BadRequest(
            f"'structured_outputs' must have exactly one of {', '.join(_STRUCTURED)}.",
            param="structured_outputs",
        )
    name = kinds[0]
    form = {"type": "object"} if name == "json_object" else value[name]
    compact = bool(value.get("disable_any_whitespace"))
    return Demand(_STRUCTURED[name], form, f"structured_outputs.{name}", compact)
