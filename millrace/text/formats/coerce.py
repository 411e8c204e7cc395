"""Untyped argument text made into JSON by the tool's schema.

XML and Python-like families write values without reliable types; the schema says what was meant.
Pure: text and schema in, JSON text out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_WORDS: dict[str, Any] = {
    "true": True, "True": True, "false": False, "False": False,
    "null": None, "None": None,
}  # fmt: skip


def resolve(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """The schema behind local references."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and depth < 32:
        target: Any = root
        for part in schema["$ref"].lstrip("#").strip("/").split("/"):
            if not part:
                continue
            target = target.get(part) if isinstance(target, Mapping) else None
        schema, depth = target, depth + 1
    return schema if isinstance(schema, Mapping) else {}


def kinds(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> frozenset[str]:
    """The JSON types a schema allows; empty when it says nothing.

    `seen` keeps schemas that refer to themselves, or to one another, from being visited twice.
    """
    schema = resolve(schema, root)
    seen = set() if seen is None else seen
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(kind for kind in declared if isinstance(kind, str))
    options = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if isinstance(options, list):
        return frozenset(_kind(option) for option in options)
    found: set[str] = set()
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word) or ():
            found |= kinds(part, root, seen)
    if not found and "properties" in schema:
        found.add("object")
    if not found and "items" in schema:
        found.add("array")
    return frozenset(found)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "string")


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value can only be a string, so that it may be passed on before it is complete."""
    return kinds(schema, root) == {"string"}


def properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name."""
    found = resolve(parameters, parameters).get("properties")
    return found if isinstance(found, Mapping) else {}


def parameter_order(parameters: Mapping[str, Any]) -> list[str]:
    """A tool's parameters as a Python signature lists them: the required ones first."""
    required = resolve(parameters, parameters).get("required")
    wanted = set(required) if isinstance(required, list) else set()
    return sorted(properties(parameters), key=lambda name: name not in wanted)


def as_object(encoded: str, parameters: Mapping[str, Any]) -> str:
    """JSON text of arguments as the text of an object.

    JSON inside a string is that JSON, nothing is no arguments, and any other value is meant for
    the first parameter, or for `input` where there is none.
    """
    value = json.loads(encoded)
    if isinstance(value, str):
        found, inner = _read(value.strip())
        if found and isinstance(inner, dict | None):
            value, encoded = inner, json.dumps(inner, ensure_ascii=False)
        elif not value.strip():
            value = None
    if isinstance(value, dict):
        return encoded
    if value is None:
        return "{}"
    name = next(iter(parameter_order(parameters)), "input")
    text = coerce_json(encoded, properties(parameters).get(name), parameters)
    return f"{{{json.dumps(name, ensure_ascii=False)}: {text}}}"


def coerce(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON text of an argument written as plain `text`."""
    allowed = kinds(schema, root)
    if allowed == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    found, value = _read(stripped)
    if found and _fits(value, allowed):
        return _write(value, stripped, allowed)
    if allowed and "string" not in allowed and found and isinstance(value, str):
        again, inner = _read(value.strip())
        if again and _fits(inner, allowed):
            return _write(inner, value.strip(), allowed)
    return json.dumps(text, ensure_ascii=False)


def coerce_json(encoded: str, schema: Any, root: Mapping[str, Any]) -> str:
    """JSON text of a value, changed only when its type is not one the schema allows."""
    allowed = kinds(schema, root)
    value = json.loads(encoded)
    if not allowed or value is None:
        return encoded
    if _fits(value, allowed):
        return _write(value, encoded, allowed)
    if isinstance(value, str):
        return coerce(value, schema, root)
    if "string" in allowed:
        return json.dumps(encoded, ensure_ascii=False)
    return encoded


def _read(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    if text in _WORDS:
        return True, _WORDS[text]
    if text[:1] in ("{", "[", "(", "'", '"'):
        try:
            value = ast.literal_eval(text)
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False, None
        return True, list(value) if isinstance(value, tuple) else value
    return False, None


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _fits(value: Any, allowed: frozenset[str]) -> bool:
    if not allowed:
        return not isinstance(value, str)
    if isinstance(value, bool):
        return "boolean" in allowed
    if isinstance(value, float) and value.is_integer() and "integer" in allowed:
        return True
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in allowed)


def _write(value: Any, text: str, allowed: frozenset[str]) -> str:
    if isinstance(value, float) and value.is_integer() and "number" not in allowed and allowed:
        return str(int(value))
    try:
        if json.loads(text) == value:
            return text
    except ValueError:
        pass
    return json.dumps(value, ensure_ascii=False)
