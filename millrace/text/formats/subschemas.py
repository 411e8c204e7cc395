"""The schemas inside a JSON schema: which keywords hold them, and a way to change each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ONE = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAP = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def map_subschemas(
    schema: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The schema with `change` applied to every schema directly inside it."""

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Mapping) else value

    def member(key: str, value: Any) -> Any:
        if key in _ONE and isinstance(value, Mapping):
            return change(value)
        if key in _LIST and isinstance(value, list):
            return [changed(part) for part in value]
        if key in _MAP and isinstance(value, Mapping):
            return {name: changed(part) for name, part in value.items()}
        return value

    return {key: member(key, value) for key, value in schema.items()}
