"""Demanded forms: what each way to ask for one lets through, and what is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from test_grammar import Vocabulary

from millrace.errors import BadRequest
from millrace.text.formats import by_name
from millrace.text.grammar import (
    answer_grammar,
    demand_of,
    demand_of_format,
    from_choice,
    from_grammar,
    from_regex,
    from_schema,
)
from millrace.text.grammar.outputs import most_alternatives

PLAIN = by_name("plain")
BYTES = Vocabulary([])


def accepts(entry: dict[str, Any], text: str) -> bool:
    return BYTES.accepts(answer_grammar(entry, PLAIN, {}), text)


def test_response_formats() -> None:
    assert demand_of_format(None) is None
    assert demand_of_format({"type": "text"}) is None
    anything = demand_of_format({"type": "json_object"})
    assert anything is not None
    assert accepts(anything.entry(), '{"a": [1, {"b": null}]}')
    assert not accepts(anything.entry(), "[1]")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for shape in (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "json_schema", "name": "x", "schema": schema},
    ):
        demand = demand_of_format(shape)
        assert demand is not None
        entry = demand.entry()
        assert accepts(entry, '{\n"n": 12\n}')
        assert not accepts(entry, '{"n": "12"}')
        for padded in ('{"n":  12}', '{\n "n": 12}', '{"n": 12\n\n}', '{\t"n": 12}', ' {"n": 12}'):
            assert not accepts(entry, padded), "at most one blank or newline between two tokens"
    for bad in ("json", {"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(BadRequest):
            demand_of_format(bad)


def test_other_ways_to_demand_a_form() -> None:
    assert accepts(from_regex(r"a/b[0-9]{2}", "regex"), "a/b12")
    assert accepts(from_choice(["yes", "no"], "guided_choice"), "no")
    assert not accepts(from_choice(["yes", "no"], "guided_choice"), "maybe")
    assert accepts(from_grammar('start: "a" "b"+', "guided_grammar"), "abb")
    gbnf = 'root ::= item ("," item)*\nitem ::= [0-9]+ | "x"'
    assert accepts(from_grammar(gbnf, "ebnf"), "1,x,23")
    for fields, text in (
        ({"guided_json": '{"type": "integer"}'}, "5"),
        ({"json_schema": '{"type": "boolean"}'}, "true"),
        ({"guided_regex": "[ab]+"}, "abba"),
        ({"ebnf": gbnf}, "7"),
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"grammar": gbnf}, "7"),
        ({"regex": "[ab]+"}, "abba"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "5"),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "5"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "abba"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
        ({"structured_outputs": {"grammar": gbnf}}, "x,1"),
        ({"structured_outputs": {"json_object": True}}, '{"a": 1}'),
    ):
        demand = demand_of(fields)
        assert demand is not None
        assert accepts(demand.entry(), text)
    assert demand_of({"guided_json": None}) is None
    with pytest.raises(BadRequest, match="only one"):
        demand_of({"guided_regex": "a", "guided_choice": ["b"]})
    mistakes: list[dict[str, Any]] = [
        {"guided_regex": "("},
        {"guided_grammar": "start: ("},
        {"guided_choice": []},
    ]
    for bad in mistakes:
        with pytest.raises(BadRequest) as error:
            demand = demand_of(bad)
            assert demand is not None
            demand.entry()
        assert error.value.param == next(iter(bad))


def test_alternatives_are_counted_at_one_place() -> None:
    assert most_alternatives('start: "a"\n') == 1
    assert most_alternatives('start: "a|b|c" | /x|y/ | b\nb: "q" | "r"\n') == 3
    assert most_alternatives('start: ("a" | "b") ("c" | "d")\n') == 2
    assert most_alternatives('start: A\nA: "a" | "b" | "c"\n') == 1
    assert most_alternatives('start: "a"\n     | "b"\n     | "c"\n') == 3
    many = 'root ::= "x" | ' + " | ".join(f'"{i}" "y"' for i in range(3000))
    with pytest.raises(BadRequest, match="3001 alternatives"):
        from_grammar(many, "ebnf")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"if": {"type": "object"}, "then": {}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"type": "number", "minimum": 3, "maximum": 2}, "minimum"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(BadRequest) as error:
        from_schema(schema, "response_format.json_schema")
    assert keyword in error.value.message
    assert error.value.param == "response_format.json_schema"


def test_an_unknown_format_is_an_annotation() -> None:
    assert accepts(from_schema({"type": "string", "format": "password"}, "s"), '"x"')


def test_walks_of_random_schemas_validate() -> None:
    rng = random.Random(5)
    for _ in range(60):
        schema = random_schema(rng, 3)
        grammar = answer_grammar(from_schema(schema, "s"), PLAIN, {})
        jsonschema.validate(json.loads(BYTES.walk(grammar, rng)), schema)


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "array", "object", "any"])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 5)}
    if kind == "enum":
        return {"enum": ["a", 1, None, True][: rng.randint(1, 4)]}
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 99)}
    if kind == "boolean" or depth == 0:
        return {"type": "boolean"}
    if kind == "array":
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "maxItems": rng.randint(0, 3)}
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    properties = {f"k{i}": random_schema(rng, depth - 1) for i in range(rng.randint(0, 3))}
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if rng.random() < 0.5],
        "additionalProperties": False,
    }
