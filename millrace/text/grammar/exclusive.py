"""`oneOf` whose alternatives exclude each other says the same as `anyOf`, which can be enforced.

It proves that from types, constants and the constants of required members (unions with a tag), through
references. What it cannot prove stays `oneOf`, for the grammar compiler to judge. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from millrace.text.formats.subschemas import map_subschemas
from millrace.text.formats.type_names import STANDARD

_DEPTH = 8
"""References, members and unions within each other that are looked through."""
_COMPARISONS = 10_000
"""Of a schema, since unions of unions have no end of pairs."""


def without_exclusive_one_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema with `anyOf` in place of every `oneOf` whose alternatives exclude each other."""
    return _Rewriting(schema).rewritten(schema)


class _Rewriting:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _COMPARISONS

    def rewritten(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        found = map_subschemas(schema, self.rewritten)
        several = schema.get("oneOf")
        if isinstance(several, list) and "anyOf" not in schema and self._apart(several):
            return {("anyOf" if k == "oneOf" else k): v for k, v in found.items()}
        return found

    def _apart(self, several: list[Any]) -> bool:
        return all(self._exclude(a, b, _DEPTH) for a, b in combinations(several, 2))

    def _exclude(self, one: Any, other: Any, depth: int) -> bool:
        """Whether nothing can be valid by both."""
        if one is False or other is False:
            return True
        self._left -= 1
        if (
            self._left < 0
            or not depth
            or not isinstance(one, Mapping)
            or not isinstance(other, Mapping)
        ):
            return False
        return any(self._plainly(a, b, depth) for a in self._views(one) for b in self._views(other))

    def _plainly(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        types, others = _types(one), _types(other)
        if types and others and not types & others:
            return True
        values, theirs = _values(one), _values(other)
        if values is not None and theirs is not None and not values & theirs:
            return True
        for a, b in ((one, other), (other, one)):
            for keyword in ("anyOf", "oneOf"):
                union = a.get(keyword)
                members = union if isinstance(union, list) else []
                if members and all(self._exclude(member, b, depth - 1) for member in members):
                    return True
        if types != {"object"} or others != {"object"}:
            return False
        these, those = _members(one), _members(other)
        return any(
            self._exclude(these[name], those[name], depth - 1) for name in these if name in those
        )

    def _views(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """All that must hold together for it: itself, what it refers to, what it is made of."""
        waiting, seen = [schema], 0
        while waiting and seen < _DEPTH:
            view = waiting.pop()
            seen += 1
            yield view
            parts = view.get("allOf")
            pointed = self._pointed(view.get("$ref"))
            more = [*(parts if isinstance(parts, list) else ()), pointed]
            waiting += [part for part in more if isinstance(part, Mapping)]

    def _pointed(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        at: Any = self._root
        for step in reference[2:].split("/"):
            # A name of its own changes what references below it are relative to.
            if not isinstance(at, Mapping) or "$id" in at:
                return None
            at = at.get(unquote(step).replace("~1", "/").replace("~0", "~"))
        return at


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The kinds of value that it allows; empty where that is not said."""
    told = schema.get("type")
    named = [told] if isinstance(told, str) else told if isinstance(told, list) else []
    kinds = {kind for kind in named if isinstance(kind, str)}
    if not kinds <= STANDARD or len(kinds) < len(named):
        return set()
    return kinds | {"integer"} if "number" in kinds else kinds


def _values(schema: Mapping[str, Any]) -> set[tuple[str, Any]] | None:
    """The only values that it allows, where they are listed and plain."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return None
    if not all(value is None or isinstance(value, str | int | float) for value in listed):
        return None
    # In JSON true is not 1, and 1 is 1.0.
    return {("boolean" if isinstance(v, bool) else "", v) for v in listed}


def _members(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The members that it requires, with what they must be."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return {}
    return {
        name: properties[name] for name in required if isinstance(name, str) and name in properties
    }
