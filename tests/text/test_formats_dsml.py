"""DeepSeek V3.2's and V4's typed tags, as the models write them beyond their templates."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import PING, SPECS, WEATHER, answer_to, function

from millrace.text.formats import by_name, tool_from_openai

VERSIONS = ("deepseek-v3.2", "deepseek-v4")
SECTIONS = ("function_calls", "tool_calls")
MIXED = tool_from_openai(
    function(
        "mixed",
        {
            "text": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "either": {"type": ["string", "integer"]},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
            "whole": {"type": "integer"},
            "part": {"type": "number"},
            "yes": {"type": "boolean"},
            "many": {"type": "array"},
            "object": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "free": {},
        },
    )
)
versions = pytest.mark.parametrize("version", VERSIONS)


def section(body: str, name: str = "tool_calls") -> str:
    return f"<｜DSML｜{name}>\n{body}\n</｜DSML｜{name}>"


def invoke(name: str, body: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{body}\n</｜DSML｜invoke>'


def parameter(key: str, value: str, string: str) -> str:
    return f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>'


def called(version: str, body: str, tools: Any = (*SPECS, MIXED)) -> list[tuple[str, Any]]:
    answer = answer_to(by_name(version), section(body), tools)
    assert answer.content == ""
    return answer.calls


@versions
@pytest.mark.parametrize("name", SECTIONS)
def test_either_versions_section(version: str, name: str) -> None:
    body = invoke("get_weather", parameter("city", "Bern", "true")) + "\n" + invoke("ping", "")
    answer = answer_to(by_name(version), f"Well.\n\n{section(body, name)}")
    assert (answer.content, answer.names) == ("Well.", ["get_weather", "ping"])
    assert answer_to(by_name(version), body).names == ["get_weather", "ping"]


@versions
@pytest.mark.parametrize("tag", ['invoke name="ping"/', 'invoke name="ping" /'])
def test_a_tag_without_a_body(version: str, tag: str) -> None:
    assert called(version, f"<｜DSML｜{tag}>") == [("ping", {})]
    two = f"<｜DSML｜{tag}>\n{invoke('get_weather', parameter('city', 'Bern', 'true'))}"
    assert called(version, two) == [("ping", {}), ("get_weather", {"city": "Bern"})]
    empty = '<｜DSML｜parameter name="city" string="true"/>'
    assert called(version, invoke("get_weather", empty)) == [("get_weather", {"city": ""})]


@versions
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"city": "Bern", "opts": {"days": 3}}', {"city": "Bern", "opts": {"days": 3}}),
        ('\n  {\n "city": "</b> <｜DSML｜x>"\n}  ', {"city": "</b> <｜DSML｜x>"}),
        ("{'city': 'Bern', 'hourly': True}", {"city": "Bern", "hourly": True}),
        ("{}", {}),
    ],
)
def test_a_json_body(version: str, body: str, arguments: dict[str, Any]) -> None:
    want = ("get_weather", arguments)
    both = invoke("get_weather", body) + "\n" + invoke("ping", "{}")
    assert called(version, both) == [want, ("ping", {})]


@pytest.mark.parametrize(
    ("key", "value", "as_string", "as_json"),
    [
        ("whole", "42", 42, 42),
        ("whole", "abc", "abc", "abc"),
        ("whole", "null", None, None),
        ("part", "2.50", 2.5, 2.5),
        ("yes", "true", True, True),
        ("yes", '"false"', False, False),
        ("many", "[1, 2]", [1, 2], [1, 2]),
        ("object", '{"a": 1}', {"a": 1}, {"a": 1}),
        ("object", "null", None, None),
        ("text", "null", "null", "null"),
        ("text", "42", "42", "42"),
        ("text", '"Bern"', '"Bern"', "Bern"),
        ("text", '{"a": 1}', '{"a": 1}', '{"a": 1}'),
        ("maybe", "null", "null", None),
        ("maybe", "Bern", "Bern", "Bern"),
        ("either", "7", "7", 7),
        ("unit", "kelvin", "kelvin", "kelvin"),
        ("unit", '"kelvin"', "kelvin", "kelvin"),
        ("free", "42", "42", 42),
        ("free", "12345e-3", "12345e-3", 12.345),
        ("new", "true", "true", True),
    ],
)
def test_the_schema_decides_and_then_the_tag(
    key: str, value: str, as_string: Any, as_json: Any
) -> None:
    for string, want in (("true", as_string), ("false", as_json)):
        ((_, arguments),) = called("deepseek-v4", invoke("mixed", parameter(key, value, string)))
        assert arguments == {key: want}
        assert type(arguments[key]) is type(want)


@versions
@pytest.mark.parametrize("key", ["input", "arguments", "parameters"])
@pytest.mark.parametrize("string", ["true", "false"])
def test_all_arguments_under_one_name(version: str, key: str, string: str) -> None:
    body = parameter(key, '{"city": "Bern", "count": 2}', string)
    want = [("get_weather", {"city": "Bern", "count": 2})]
    assert called(version, invoke("get_weather", body)) == want
    after = parameter("hourly", "true", "false") + body
    assert called(version, invoke("get_weather", after)) == [
        ("get_weather", {"hourly": True, "city": "Bern", "count": 2})
    ]
    own = tool_from_openai(function("get_weather", {key: {"type": "object"}}))
    assert called(version, invoke("get_weather", body), [own]) == [
        ("get_weather", {key: {"city": "Bern", "count": 2}})
    ]
    plain = parameter(key, "see below", string)
    assert called(version, invoke("get_weather", plain)) == [("get_weather", {key: "see below"})]


@versions
@pytest.mark.parametrize("word", ["toolcalls", "calls", "tool_calls_begin", "function_call"])
def test_a_section_with_a_wrong_name_is_not_content(version: str, word: str) -> None:
    text = section(invoke("ping", ""), word)
    answer = answer_to(by_name(version), f"Well.\n\n{text}")
    assert (answer.content, answer.calls) == ("Well.", [("ping", {})])


@versions
def test_half_the_token_is_only_text(version: str) -> None:
    for text in ("<｜DSM and so on", "a <｜ b", "< ｜DSML｜"):
        assert answer_to(by_name(version), text).content == text


def test_names_of_a_tool_that_is_in_no_group() -> None:
    muse = by_name("muse")
    tools = [tool_from_openai(WEATHER), tool_from_openai(PING)]

    def message(recipient: str, name: str) -> str:
        return (
            f" to={recipient}<|message|><atem:function_calls>\n"
            f'<atem:invoke name="{name}">\n<atem:parameter name="city">Bern</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls><|eom|>"
        )

    doubled = "get_weather.get_weather"
    text = message(doubled, doubled) + "<|start|>assistant" + message("get_weather", "get_weather")
    answer = answer_to(muse, text, tools, prompt=muse.primers[0])
    assert (answer.content, answer.names) == ("", ["get_weather", "get_weather"])
    assert answer.calls[0] == ("get_weather", {"city": "Bern"})
    other = message("get_weather.ping", "get_weather.ping")
    answer = answer_to(muse, other, tools, prompt=muse.primers[0])
    assert answer.names == []
    grouped = tool_from_openai(function("x.x", {}))
    answer = answer_to(muse, message("x.x", "x.x"), [grouped], prompt=muse.primers[0])
    assert answer.names == ["x.x"]
