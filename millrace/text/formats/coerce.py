"""Untyped argument text made into JSON by the tool's schema.

XML and Python-like families write values without reliable types; the schema says what was meant.
Pure: text and schema in, JSON text out.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.text.formats.type_names import standard_types

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


_WRAPPERS = ("arguments", "input", "parameters", "properties")
"""Names under which some models put all arguments at once."""


def resolve(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """The schema behind local references."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and depth < 32:
        target: Any = root
        for part in schema["$ref"].lstrip("#").strip("/").split("/"):
            if not part:
                continue
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
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
    if isinstance(declared, str | list) and declared != "enum":
        return _declared(declared)
    options = _options(schema)
    if options is not None:
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


def _declared(names: str | list[Any]) -> frozenset[str]:
    """The types of a schema's `type`; empty where one of its names is unknown or means any type."""
    found: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        types = standard_types(name) if isinstance(name, str) else None
        if not types:
            return frozenset()
        found |= types
    return frozenset(found)


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    options = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    return options if isinstance(options, list) else None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "string")


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value can only be a string, so that it may be passed on before it is complete.

    One of a few given strings is read whole: what a model writes may need to be brought to them.
    """
    return kinds(schema, root) == {"string"} and _options(resolve(schema, root)) is None


def properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name, of all alternatives where it has several."""
    return _properties(parameters, parameters, set())


def _properties(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Mapping[str, Any]:
    found = resolve(schema, root)
    own = found.get("properties")
    merged = dict(own) if isinstance(own, Mapping) else {}
    if id(found) in seen:
        return merged
    seen.add(id(found))
    for word in ("allOf", "anyOf", "oneOf"):
        parts = found.get(word)
        for part in parts if isinstance(parts, list) else ():
            for name, inner in _properties(part, root, seen).items():
                known = merged.get(name)
                merged[name] = inner if known is None else {"anyOf": [known, inner]}
    return merged


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


def may_wrap(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a parameter of this name may hold all arguments: it is none of the tool's own."""
    known = properties(parameters)
    return name in _WRAPPERS and bool(known) and name not in known


def unwrapped(text: str, schema: Mapping[str, Any]) -> str:
    """All arguments, written as one object under a name that is none of the tool's parameters.

    Returns the object's members as JSON text; nothing where they are not the tool's own.
    """
    found = coerce(text, {"type": ["object", "string"]}, schema)
    value = json.loads(found)
    if isinstance(value, dict) and value and set(value) <= set(properties(schema)):
        return found.strip()[1:-1].strip()
    return ""


def coerce(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON text of an argument written as plain `text`."""
    allowed = kinds(schema, root)
    stripped = text.strip()
    if allowed == {"string"}:
        return json.dumps(_option(text, _options(resolve(schema, root))), ensure_ascii=False)
    if not allowed or "string" in allowed:
        found, value = _read(stripped)
        options = _options(resolve(schema, root))
        listed = options is not None and stripped in options and value not in options
        if found and not listed and _fits(value, allowed):
            return _write(value, stripped, allowed)
        return json.dumps(stripped if listed else text, ensure_ascii=False)
    for written in _readings(stripped):
        found, value = _read(written)
        if found and (value is None or _fits(value, allowed)):
            return _write(value, written, allowed)
    return json.dumps(text, ensure_ascii=False)


def unquoted(text: str) -> str:
    """The string that JSON text of a string stands for; any other text is the string itself."""
    found, value = _read(text.strip())
    return value if found and isinstance(value, str) else text


def _option(text: str, options: list[Any] | None) -> str:
    """The given string that `text` means: without blanks or quotes around it, where it has them."""
    readings = (text, text.strip(), unquoted(text))
    return next((reading for reading in readings if reading in (options or ())), text)


def _readings(text: str) -> Iterator[str]:
    """A value that is no string as it stands, out of its quotes, and with its quotes unescaped."""
    yield text
    yield unquoted(text).strip()
    if text.lower() in ("true", "false", "null"):
        yield text.lower()
    if '\\"' in text:
        yield unquoted(f'"{text}"')
        yield unquoted(unquoted(f'"{text}"')).strip()


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
