"""Types as people's schemas name them, wherever a schema is consulted: values, grammars, prompts."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import answer_to, function
from test_grammar import Vocabulary, specials, written

from millrace.errors import BadRequest
from millrace.text.formats import OutputFormat, by_name, names, tool_from_openai
from millrace.text.formats.call_encoder import Call
from millrace.text.formats.coerce import coerce, properties
from millrace.text.formats.tool_prompt import show_tools
from millrace.text.formats.type_names import standard_types, standardised
from millrace.text.grammar import calls_grammar, from_schema

ALIASES = {
    "string": ["str", "String", "text", "VARCHAR(255)", "uuid", "date", "date-time", "bytes"],
    "integer": ["int", "Int32", "uint8", "long", "long long", "bigint", "unsigned int"],
    "number": ["float", "double", "Float64", "decimal(10,2)", "num", "numeric", "real"],
    "boolean": ["bool", "Boolean", "BOOL"],
    "object": ["dict", "dict[str, int]", "map", "Map<string, int>", "Dictionary", "struct"],
    "array": ["list", "list[str]", "List<int>", "tuple", "set", "arr", "string[]", "sequence"],
    "null": ["None", "NoneType", "nil"],
}


@pytest.mark.parametrize(("kind", "alias"), [(k, a) for k, all in ALIASES.items() for a in all])
def test_a_type_by_another_name(kind: str, alias: str) -> None:
    assert standard_types(alias) == {kind}
    assert standardised({"type": alias}) == {"type": kind}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("any", []),
        ("Any", []),
        ("json", []),
        ("int | None", ["integer", "null"]),
        ("string|number", ["number", "string"]),
        ("Optional[int]", ["integer", "null"]),
        ("Union[str, list[int]]", ["array", "string"]),
        ("int | any", []),
    ],
)
def test_several_types_in_one_name(name: str, kinds: list[str]) -> None:
    assert standard_types(name) == set(kinds)
    expected = {} if not kinds else {"type": kinds}
    assert standardised({"type": name}) == expected


@pytest.mark.parametrize("name", ["internal", "list_price", "integer_enum", "floating", "geometry"])
def test_a_name_that_only_begins_like_one_is_unknown(name: str) -> None:
    assert standard_types(name) is None
    assert standardised({"type": name}) == {"type": name}
    with pytest.raises(BadRequest, match=name):
        from_schema({"type": "object", "properties": {"x": {"type": name}}}, "response_format")
    assert [coerce(text, {"type": name}, {}) for text in ("3", "a b")] == ["3", '"a b"']


def test_only_schemas_are_changed() -> None:
    inner = {"type": "int"}
    schema = {
        "type": "dict",
        "properties": {
            "type": {"type": "str", "default": {"type": "int"}},
            "kind": {"const": {"type": "float"}},
            "level": {"type": "enum", "enum": [1, "a"]},
            "list": {"type": ["list", "None", "array"], "items": inner},
        },
        "$defs": {"x": {"anyOf": [inner, {"type": ["varchar", "null"]}]}},
        "additionalProperties": inner,
    }
    assert standardised(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "default": {"type": "int"}},
            "kind": {"const": {"type": "float"}},
            "level": {"enum": [1, "a"]},
            "list": {"type": ["array", "null"], "items": {"type": "integer"}},
        },
        "$defs": {"x": {"anyOf": [{"type": "integer"}, {"type": ["string", "null"]}]}},
        "additionalProperties": {"type": "integer"},
    }


LOOSE = tool_from_openai(
    function(
        "f",
        {
            "ratio": {"type": "float"},
            "count": {"type": "int"},
            "loud": {"type": "bool"},
            "opts": {"type": "dict"},
            "tags": {"type": "list[str]"},
            "name": {"type": "str"},
            "maybe": {"type": "Optional[int]"},
            "free": {"type": "any"},
        },
    )
)
WRITTEN = {
    "ratio": "2.5",
    "count": "7",
    "loud": "true",
    "opts": '{"a": 1}',
    "tags": "['x']",
    "name": "12",
    "maybe": "null",
    "free": "[1]",
}
MEANT = {
    "ratio": 2.5,
    "count": 7,
    "loud": True,
    "opts": {"a": 1},
    "tags": ["x"],
    "name": "12",
    "maybe": None,
    "free": [1],
}


@pytest.mark.parametrize(
    ("family", "open", "parameter", "close"),
    [
        ("qwen3-coder", "<tool_call>\n<function=f>\n", "<parameter={}>\n{}\n</parameter>\n",
         "</function>\n</tool_call>"),
        ("glm-4.7", "<tool_call>f", "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
         "</tool_call>"),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n',
         '<parameter name="{}">{}</parameter>\n', "</invoke>\n</minimax:tool_call>"),
        ("deepseek-v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n',
         '<｜DSML｜parameter name="{}" string="true">{}</｜DSML｜parameter>\n',
         "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
        ("minicpm5", '<function name="f">', '<param name="{}">{}</param>', "</function>"),
    ],
)  # fmt: skip
def test_arguments_follow_them(family: str, open: str, parameter: str, close: str) -> None:
    body = "".join(parameter.format(key, value) for key, value in WRITTEN.items())
    ((_, arguments),) = answer_to(by_name(family), open + body + close, [LOOSE]).calls
    if family == "deepseek-v4":
        # Where the schema says nothing, the tag does: these are marked as strings.
        assert arguments.pop("free") == "[1]"
    assert arguments == {key: MEANT[key] for key in arguments}
    assert len(arguments) >= 7


def test_arguments_of_python_calls_follow_them() -> None:
    text = '<|tool_call_start|>[f(ratio="2.5", count="7", loud="True", name=12)]<|tool_call_end|>'
    want = {"ratio": 2.5, "count": 7, "loud": True, "name": "12"}
    assert answer_to(by_name("lfm2"), text, [LOOSE]).calls == [("f", want)]


ALARM = tool_from_openai(
    function(
        "alarm",
        {
            "label": {"type": "str", "maxLength": 4},
            "hour": {"type": "int", "minimum": 0, "maximum": 23},
            "share": {"type": "float"},
            "where": {
                "type": "dict",
                "properties": {"room": {"type": "str", "enum": ["a", "b"]}},
                "required": ["room"],
            },
        },
        ["label", "hour"],
    )
)


@pytest.mark.parametrize("format", [by_name(n) for n in names()], ids=lambda format: format.name)
def test_grammars_enforce_them(format: OutputFormat) -> None:
    vocabulary = Vocabulary(specials(format))
    grammar = calls_grammar(format, [ALARM], vocabulary.tokens)
    good = {"label": "up", "hour": 7, "share": 0.5, "where": {"room": "b"}}
    assert vocabulary.accepts(grammar, written(format, [Call("alarm", good, "abcdefgh1")]))
    for bad in ({**good, "hour": 99}, {**good, "share": [1]}, {**good, "where": 1}):
        assert not vocabulary.accepts(grammar, written(format, [Call("alarm", bad, "abcdefgh1")]))


def test_a_demanded_schema_may_use_them() -> None:
    entry = from_schema({"type": "dict", "properties": {"x": {"type": "float"}}}, "p")
    assert entry["json_schema"]["properties"]["x"] == {"type": "number"}


def test_signatures_show_them() -> None:
    shown = show_tools(by_name("gemma-3"), [LOOSE])
    assert "ratio: float" in shown and "count: int" in shown and "tags: list" in shown


@pytest.mark.parametrize(
    ("schema", "text", "meant"),
    [
        ({"enum": ["7", 8]}, "7", '"7"'),
        ({"enum": ["7", 8]}, "8", "8"),
        ({"type": ["string", "integer"], "enum": ["auto", 1]}, "1", "1"),
        ({"enum": ["celsius"]}, '"celsius"', '"celsius"'),
        ({"const": "null"}, "null", '"null"'),
        ({"type": "integer"}, '\\"12\\"', "12"),
        ({"type": "array"}, '[{\\"a\\": 1}]', '[{"a": 1}]'),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "integer"}, "null", "null"),
        ({"type": "string"}, '"a"', '"\\"a\\""'),
        ({"type": ["string", "null"]}, '"null"', '"null"'),
        ({"$ref": "#/$defs/a~1b~0c"}, "7", "7"),
        ({"$ref": "#/$defs/loop"}, "auto", '"auto"'),
    ],
)
def test_single_values(schema: dict[str, Any], text: str, meant: str) -> None:
    root = {"$defs": {"a/b~c": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert coerce(text, schema, root) == meant


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_parameters_in_alternatives(word: str) -> None:
    parts = [
        {"properties": {"kind": {"const": "text"}, "value": {"type": "string"}}},
        {"$ref": "#/$defs/count"},
    ]
    count = {"properties": {"kind": {"const": "count"}, "value": {"type": "integer"}}}
    root = {word: parts, "$defs": {"count": count}}
    found = properties(root)
    assert coerce("7", found["value"], root) == "7"
    assert coerce("auto", found["value"], root) == '"auto"'
    assert properties({"$ref": "#"}) == {}
