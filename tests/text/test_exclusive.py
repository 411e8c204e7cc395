"""Which alternatives exclude each other: never claimed wrongly, and found for unions with a tag."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.text.grammar.exclusive import without_exclusive_one_of
from millrace.text.grammar.schema import enforceable

scalars = st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, "a", "b", ""])
leaves: st.SearchStrategy[Any] = st.one_of(
    st.just({}),
    st.builds(lambda v: {"const": v}, scalars),
    st.builds(lambda v: {"enum": v}, st.lists(scalars, min_size=1, max_size=3)),
    st.builds(
        lambda t: {"type": t},
        st.sampled_from(
            ["null", "boolean", "integer", "number", "string", "object", ["string", "null"]]
        ),
    ),
    st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/self"}]),
)


def _object(member: Any, required: bool, typed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"properties": {"k": member}}
    if required:
        found["required"] = ["k"]
    return {"type": "object"} | found if typed else found


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, inner, st.booleans(), st.booleans()),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda several: {"allOf": several}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda several: {"oneOf": several}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)
values = st.one_of(scalars, st.just([]), st.dictionaries(st.just("k"), scalars))
DEFS = {"one": {"type": "string"}, "a/b": {"const": 1}, "self": {"anyOf": [{"const": "a"}]}}


@given(st.lists(schemas, min_size=2, max_size=3), st.lists(values, max_size=8))
def test_what_is_rewritten_means_the_same(several: list[Any], tried: list[Any]) -> None:
    before = {"$defs": DEFS, "oneOf": several}
    after = without_exclusive_one_of(before)
    one, other = (jsonschema.Draft202012Validator(schema) for schema in (before, after))
    for value in (None, True, 0, 1, "a", {}, {"k": 1}, {"k": "a"}, *tried):
        assert one.is_valid(value) == other.is_valid(value), (after, value)


def _tagged(tag: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"]}


@pytest.mark.parametrize(
    "several",
    [
        [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}],
        [_tagged("a"), _tagged("b"), {"type": "null"}],
        [_tagged(1), _tagged(2)],
        [{"type": "string"}, {"$ref": "#/$defs/one"}],
        [{"type": "null"}, {"$ref": "#/$defs/either"}],
        [{"type": "object", "properties": {"x": _tagged(n)}, "required": ["x"]} for n in "ab"],
    ],
)
def test_unions_that_exclude_each_other_are_enforced(several: list[Any]) -> None:
    either = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    defs = {"one": _tagged("a"), "two": _tagged("b"), "either": either}
    schema = {"type": "object", "properties": {"at": {"oneOf": several}}, "$defs": defs}
    assert "oneOf" not in enforceable(schema, "schema")["properties"]["at"]
    assert "anyOf" in enforceable({"oneOf": several, "$defs": defs}, "schema")


def test_names_and_values_that_only_look_like_it_stay() -> None:
    schema = {
        "type": "object",
        "properties": {"oneOf": {"type": "string"}, "x": {"enum": [{"oneOf": [False, False]}]}},
        "default": {"oneOf": [{"type": "null"}, {"type": "string"}]},
    }
    assert without_exclusive_one_of(schema) == schema


def test_unions_of_unions_end() -> None:
    schema: Any = {"type": "string"}
    for _ in range(4):
        schema = {"oneOf": [schema] * 8}
    wide = {"oneOf": [{"const": number} for number in range(2000)]}
    assert without_exclusive_one_of(schema) == schema
    assert without_exclusive_one_of(wide) == wide
