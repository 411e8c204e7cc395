"""The form that an answer must have, from the fields of every server that has a way to say it."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.errors import Unsupported
from millrace.text.grammar import Demand, demand_of


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's way to demand a form: exactly one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    """Accepted: there is nothing here to fall back to."""


class FormFields(msgspec.Struct, kw_only=True):
    """The form that the answer must have, in the words of every server that has a way to say it."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


def demanded(wire: FormFields) -> Demand | None:
    """The form that the answer must have, from whichever field asks for one."""
    fields = {name: getattr(wire, name) for name in FormFields.__struct_fields__}
    if wire.structured_outputs is not None:
        fields["structured_outputs"] = _structured(wire.structured_outputs)
    return demand_of(fields)


def _structured(wire: StructuredOutputs) -> dict[str, Any]:
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(wire, name) not in (None, False):
            param = f"structured_outputs.{name}"
            raise Unsupported(f"'{param}' is not supported by this server.", param=param)
    return {k: v for k, v in msgspec.structs.asdict(wire).items() if v not in (None, False)}
