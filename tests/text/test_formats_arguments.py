"""Arguments as models write them: Python's literals, words without quotes, and what is no object."""

from __future__ import annotations

from typing import Any

import pytest
from test_formats_support import PING, SPECS, answer_to, function

from millrace.text.formats import by_name, tool_from_openai
from millrace.text.formats.arguments import completion

LOOSE = tool_from_openai(function("f", {"x": {}, "y": {}}))
ORDERED = tool_from_openai(
    function("g", {"first": {"type": "string"}, "second": {}, "third": {}}, ["third", "second"])
)
TOOLS = [LOOSE, ORDERED, tool_from_openai(PING), *SPECS]
WRAPPED = {
    "pythonic": "[{}]",
    "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "gemma-3": "```tool_code\n{}\n```",
}
families = pytest.mark.parametrize("family", WRAPPED)


def called(family: str, call: str) -> list[tuple[str, Any]]:
    answer = answer_to(by_name(family), WRAPPED[family].format(call), TOOLS)
    assert answer.content == ""
    return answer.calls


@families
@pytest.mark.parametrize("text", ["12345", "true", "null", "[1]", "None", "1.5", "{}", ""])
def test_a_quoted_string_stays_a_string(family: str, text: str) -> None:
    assert called(family, f'f(x="{text}", y=1)') == [("f", {"x": text, "y": 1})]
    assert called(family, f"f(x='{text}')") == [("f", {"x": text})]


@families
def test_a_quoted_number_is_one_where_the_schema_wants_it(family: str) -> None:
    call = 'get_weather(city=12345, count="7", hourly="True")'
    want = {"city": "12345", "count": 7, "hourly": True}
    assert called(family, call) == [("get_weather", want)]


@families
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{1, 2}", [1, 2]),
        ("{'a', \"b\"}", ["a", "b"]),
        ("{(1, 2), (3, 4)}", [[1, 2], [3, 4]]),
        ("{'a': {'b', 'c'}}", {"a": ["b", "c"]}),
        ("{'a'}", ["a"]),
        ("{}", {}),
        ("{1: 'one', 'two': 2}", {"1": "one", "two": 2}),
        ("(1, 'a', None)", [1, "a", None]),
        ("[True, -1.5]", [True, -1.5]),
    ],
)
def test_sets_and_other_literals(family: str, written: str, meant: Any) -> None:
    assert called(family, f"f(x={written}, y={written})") == [("f", {"x": meant, "y": meant})]


@families
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("f(x=Paris)", {"x": "Paris"}),
        ("f(x=New York, y=3)", {"x": "New York", "y": 3}),
        ("f(x=Paris, France, y=3)", {"x": "Paris, France", "y": 3}),
        ("f(x=2024-01-31)", {"x": "2024-01-31"}),
        ("f(x=12abc, y=C++)", {"x": "12abc", "y": "C++"}),
        ("f(x=min(1, 2), y=[a, b])", {"x": "min(1, 2)", "y": ["a", "b"]}),
        ("f(Paris, 3)", {"x": "Paris", "y": 3}),
        ("f(x=Zürich 雪)", {"x": "Zürich 雪"}),
        ("f(\n  x=Paris,\n  y=4,\n)", {"x": "Paris", "y": 4}),
        ("f(x=None, y=null)", {"x": None, "y": None}),
    ],
)
def test_values_without_quotes(family: str, call: str, arguments: dict[str, Any]) -> None:
    assert called(family, call) == [("f", arguments)]


@families
def test_positional_arguments_in_the_order_of_the_stub(family: str) -> None:
    want = {"second": 1, "third": 2, "first": "c", "arg0": 4, "arg1": "e"}
    assert called(family, "g(1, 2, 'c', 4, 'e')") == [("g", want)]
    assert called(family, "g(1, first='c')") == [("g", {"second": 1, "first": "c"})]
    assert called(family, "ping(5)") == [("ping", {"arg0": 5})]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("g new york in May", {"second": "new york in May"}),
        ("get_weather New York", {"city": "New York"}),
        ('get_weather "New York"', {"city": "New York"}),
        ("get_weather city=Bern count=2", {"city": "Bern", "count": 2}),
        ("ping now and then", {"input": "now and then"}),
        ("ping", {}),
    ],
)
def test_a_line_of_shell(line: str, arguments: dict[str, Any]) -> None:
    assert called("gemma-3", line) == [(line.split()[0], arguments)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{}", {}),
        ("null", {}),
        ('""', {}),
        ('"null"', {}),
        ('"{}"', {}),
        ('"{\\"city\\": \\"B\\u00e9\\"}"', {"city": "Bé"}),
        ('" {\\"city\\": \\"B\\"} "', {"city": "B"}),
        ("\"{'city': True}\"", {"city": True}),
        ("{'city': 'Be\\'r\"n'}", {"city": "Be'r\"n"}),
        ('"Bern"', {"city": "Bern"}),
        ('["Bern"]', {"city": '["Bern"]'}),
        ("12", {"city": "12"}),
        ("true", {"city": "true"}),
    ],
)
def test_arguments_are_always_an_object(written: str, meant: dict[str, Any]) -> None:
    texts = {
        "hermes": f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>',
        "mistral": f"[TOOL_CALLS]get_weather[ARGS]{written}",
        "kimi-k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{written}<|tool_call_end|>",
    }
    texts["minimax-m1"] = f'<tool_calls>{{"arguments": {written}, "name": "get_weather"}}'
    for family, text in texts.items():
        assert answer_to(by_name(family), text).calls == [("get_weather", meant)], family


def test_a_call_in_single_quotes() -> None:
    body = "{'name': 'get_weather', 'arguments': {'city': \"Bern's\", 'hourly': True}}"
    want = [("get_weather", {"city": "Bern's", "hourly": True})]
    assert answer_to(by_name("hermes"), f"<tool_call>{body}</tool_call>").calls == want
    assert answer_to(by_name("plain"), body).calls == want


def test_a_broken_object_in_a_string_is_completed() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Be"}</tool_call>'
    assert answer_to(by_name("hermes"), text).calls == [("get_weather", {"city": "Be"})]


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("", "{}"),
        ("{", "}"),
        ('{"a', '": null}'),
        ('{"a"', ": null}"),
        ('{"a":', "null}"),
        ('{"a": "b\\"', '"}'),
        ('{"a": [1, ', "null]}"),
        ('{"a": [1, {"b": "c"', "}]}"),
        ('{"a": 1}', ""),
    ],
)
def test_what_completes_a_beginning(begun: str, rest: str) -> None:
    assert completion(begun) == rest
