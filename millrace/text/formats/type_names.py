"""The names that people's schemas give to types, and JSON Schema's own name for each.

Schemas made by hand or from Python, SQL or TypeScript say `float`, `dict` or `list[str]`. Coercion
reads single names; grammars need whole schemas in JSON Schema's words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.text.formats.subschemas import map_subschemas

STANDARD = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_NAMES: dict[str, tuple[str, ...]] = {
    "string": (
        "str", "text", "char", "varchar", "character", "enum", "uuid", "date", "datetime", "time",
        "timestamp", "bytes", "binary", "blob", "bytea", "url", "uri", "email",
    ),
    "integer": ("int", "long", "short", "bigint", "smallint", "tinyint", "unsigned", "uint"),
    "number": ("num", "numeric", "float", "double", "decimal", "real"),
    "boolean": ("bool",),
    "object": ("dict", "dictionary", "map", "mapping", "struct", "record", "hash"),
    "array": ("arr", "list", "tuple", "set", "frozenset", "sequence"),
    "null": ("none", "nonetype", "nil", "void", "undefined"),
}  # fmt: skip
_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in (kind, *names)}
_ANYTHING = frozenset({"any", "all", "mixed", "unknown", "json", "variant"})
_SIZED = re.compile(r"(u?int|float)\d{1,3}\Z")
_PARAMETERS = re.compile(r"\s*[\[<(].*\Z", re.DOTALL)
_CHOICE = re.compile(r"(optional|union)\s*[\[<](.*)[\]>]\Z", re.DOTALL)


def standard_types(name: str) -> frozenset[str] | None:
    """The JSON types that a type's name stands for, empty for all of them; None if not known."""
    if name in STANDARD:
        return frozenset({name})
    text = name.strip().lower()
    choice = _CHOICE.match(text)
    parts = _split(choice.group(2), ",") if choice is not None else _split(text, "|")
    if choice is not None or len(parts) > 1:
        found = [standard_types(part) for part in parts]
        if None in found:
            return None
        if frozenset() in found:
            return frozenset()
        optional = {"null"} if choice is not None and choice.group(1) == "optional" else set()
        return frozenset(optional.union(*(part for part in found if part is not None)))
    if text.endswith("[]"):
        return frozenset({"array"})
    text = _PARAMETERS.sub("", text).replace("-", "")
    if text in _ANYTHING:
        return frozenset()
    sized = _SIZED.match(text)
    if sized is not None:
        text = sized.group(1)
    kind = _BY_NAME.get(text) or _BY_NAME.get(text.partition(" ")[0])
    return frozenset({kind}) if kind is not None else None


def _split(text: str, separator: str) -> list[str]:
    """The parts of a choice, brackets inside them left whole."""
    parts = [""]
    depth = 0
    for char in text:
        depth += (char in "[<(") - (char in "]>)")
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def standardised(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with JSON Schema's own type names; unknown ones stay, to be refused by name."""
    return _with_standard_type(map_subschemas(schema, standardised))


def _with_standard_type(found: dict[str, Any]) -> dict[str, Any]:
    declared = found.get("type")
    names = declared if isinstance(declared, list) else [declared]
    if all(name in STANDARD for name in names if isinstance(name, str)):
        return found
    kinds: list[Any] = []
    for name in names:
        types = standard_types(name) if isinstance(name, str) else None
        if types is None:
            kinds.append(name)
            continue
        if not types or (str(name).lower() == "enum" and "enum" in found):
            return {key: value for key, value in found.items() if key != "type"}
        kinds += sorted(types - set(kinds))
    return {**found, "type": kinds[0] if len(kinds) == 1 else kinds}
