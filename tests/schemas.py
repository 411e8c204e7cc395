"""Random JSON schemas of the kinds people send: nested, enums, ranges, arrays, anyOf, refs, patterns."""

from __future__ import annotations

import random
from typing import Any


def schema(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    top = _object(dice, depth=2)
    if seed % 5 == 0:
        top["properties"]["linked"] = {"$ref": "#/$defs/point"}
        top["required"].append("linked")
        top["$defs"] = {"point": _object(dice, depth=0)}
    return top


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(["id", "name", "kind", "score", "tags", "size", "note", "open"], 3)
    return {
        "type": "object",
        "properties": {n: _value(dice, depth) for n in names},
        "required": names[: dice.randrange(1, 4)],
        "additionalProperties": False,
    }


def _value(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randrange(-50, 50)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": dice.randrange(1, 12)},
        {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{1,3}$"},
        {"enum": dice.sample(["red", "green", "blue", 7, None, True], 3)},
        {"type": "integer", "minimum": low, "maximum": low + dice.randrange(0, 200)},
        {"type": "number", "minimum": 0, "maximum": 10},
        {"type": "boolean"},
        {"const": "fixed"},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 9}]},
    ]
    if depth:
        items = _value(dice, depth - 1)
        kinds += [{"type": "array", "items": items, "minItems": 1, "maxItems": 3}] * 2
        kinds += [_object(dice, depth - 1)] * 2
    return dice.choice(kinds)
